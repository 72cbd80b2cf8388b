"""HTTP code that all servers share: connections, API keys, errors, request bodies, operators' verbs and the dashboard.

Routes of only one server belong to the package of that server.
"""
