"""The metrics of others: the names and labels that the boards of vLLM and LMCache know, from kvtier's numbers."""
