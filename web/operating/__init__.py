"""Commands ("verbs") of operators to a running server, such as reset and pin, with access control and an audit log."""
