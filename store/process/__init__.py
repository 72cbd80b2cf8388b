"""A store in a process of its own."""
