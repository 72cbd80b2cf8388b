"""Data movement: copies of blocks between device, host and disk slots, run by lanes, which are queues with threads."""
