"""`kvtier route`: a router that prefers the replica with most of a prompt in its cache, unless it is too busy."""
