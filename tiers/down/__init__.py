"""The way down: copies made ahead of eviction."""
