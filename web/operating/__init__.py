"""Operators' verbs, such as reset and pin, which act on a running server, with access control and an audit log."""
