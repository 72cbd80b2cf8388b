"""Data movement: copies of blocks between device, host and disk slots, run by lanes."""
