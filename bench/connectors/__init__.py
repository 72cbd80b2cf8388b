"""Other engines on kvtier, by adapters of ours."""
