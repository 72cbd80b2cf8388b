"""Cache policy: which tier holds each block, and which blocks to spill (copy down), promote (copy up) or evict.

This package only decides. `kvtier.transfer` copies the bytes.
"""
