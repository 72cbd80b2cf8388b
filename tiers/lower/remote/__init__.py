"""The remote tier, which machines share: hints of its content, queries, reads and writes."""
