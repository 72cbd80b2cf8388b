"""A disk below `generate` of transformers."""
