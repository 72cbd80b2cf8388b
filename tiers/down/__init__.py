"""Spilling: copies of device blocks to host memory before they are evicted."""
