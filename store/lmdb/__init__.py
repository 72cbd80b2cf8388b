"""The store on disk: an LMDB index, and slabs beside it."""
