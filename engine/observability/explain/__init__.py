"""Explanations, block by block, of why a prompt was a hit or a miss. No text of a prompt is kept."""
