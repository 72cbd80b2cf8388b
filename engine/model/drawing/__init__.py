"""Sampling: chooses the next token of each request from the model's logits, for all requests of a step together."""
