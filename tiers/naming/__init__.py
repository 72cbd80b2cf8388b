"""Names of blocks and tiers, and the blocks that each kind of attention needs to resume after a token."""
