"""The store on disk: an LMDB index, and slab files for the payloads."""
