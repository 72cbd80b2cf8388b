"""`kvtier demo`."""
