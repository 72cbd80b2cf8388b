"""Documents: texts that clients store so that their KV is computed in advance and stays cached."""
