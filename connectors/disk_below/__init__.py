"""A disk below an engine that has host memory of its own: its rows in, and out again, verified."""
