"""Slot bookkeeping: which slot holds which block, and which block is evicted next."""
