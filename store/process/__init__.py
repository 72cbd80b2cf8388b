"""A store in a process of its own: `StoreProcess` asks, `StoreServer` answers."""
