"""HTTP code of all servers: connections, API keys, errors, request bodies, operators' commands and the dashboard.

Routes that only one server has are in the package of that server.
"""
