"""The door at which kvtier's own engines attach."""
