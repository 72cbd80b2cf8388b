"""Bytes at rest: a key gives back exactly the bytes that were put, or nothing."""
