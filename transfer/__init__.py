"""Bytes in motion: moves blocks between slots, device or host, over lanes."""
