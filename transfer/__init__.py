"""Bytes in motion: copies of blocks between slots of device, host and disk, over lanes."""
