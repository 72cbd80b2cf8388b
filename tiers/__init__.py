"""Cache policy: which block is in which tier, and what to spill, promote and evict. Moves no bytes itself."""
