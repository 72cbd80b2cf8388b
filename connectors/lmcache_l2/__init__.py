"""A disk tier below LMCache: its plug-in point for L2 adapters."""
