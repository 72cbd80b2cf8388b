"""`kvtier route`: sends each request to the replica that has most of its prompt, and has the time for it."""
