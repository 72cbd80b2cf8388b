"""Sampling the next tokens of all requests of a step from their logits, in one pass."""
