"""The store on disk: an index in LMDB, and slab files that hold the payloads in slots of one size per file."""
