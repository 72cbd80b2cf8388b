"""The remote tier, a store that several machines share: queries, reads, writes, and hints of its content."""
