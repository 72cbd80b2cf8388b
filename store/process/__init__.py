"""A store in a process of its own: `StoreProcess` is the client, `StoreServer` the server."""
