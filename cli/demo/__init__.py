"""`kvtier demo`: questions about one long document, answered from each tier."""
