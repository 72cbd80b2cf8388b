"""Index and slabs on disk."""
