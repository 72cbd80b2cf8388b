"""The endpoint at which kvtier's own engines attach."""
