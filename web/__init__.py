"""HTTP code shared by all servers: access, keys, errors, request bodies, the operators' verbs and the dashboard.

A route that only one server has belongs to the package of that server.
"""
