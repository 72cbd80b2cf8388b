"""`kvtier route`: a router that sends each request to the replica with most of its prompt, unless it is too busy."""
