"""The `kvtier demo` command, which asks questions about one long document and answers them from each tier."""
