"""HTTP code that all servers share: connections, API keys, errors, request bodies, operators' verbs and the dashboard.

Routes that only one server has are in the package of that server.
"""
