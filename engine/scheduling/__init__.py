"""Whose tokens are computed next, and who waits for what."""
