"""Cache policy: where each block is, and which to spill (copy down), promote (copy up) or evict. Moves no bytes."""
