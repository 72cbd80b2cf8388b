"""Documents: stored texts whose KV is computed before prompts that begin with them arrive, and stays cached."""
