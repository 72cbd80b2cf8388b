"""Names of blocks and tiers, and which blocks each kind of attention needs to resume a prompt."""
