"""Explanations, block by block, of why a prompt was a hit or a miss, without keeping any of its text."""
