"""Operators' verbs, which act on a running server, with access control and an audit log."""
