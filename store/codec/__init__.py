"""Encoding, sealing and encryption of the bytes of a block at rest."""
