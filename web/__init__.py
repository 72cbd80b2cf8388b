"""What the HTTP servers share: access, keys, errors, request bodies, the operators' verbs and the dashboard.

A route that only one server answers belongs to that server.
"""
