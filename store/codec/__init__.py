"""Compression, encryption and verification of the bytes of stored blocks."""
