"""Operators' verbs: what those who run a server may have it do while it serves, and the log of that."""
