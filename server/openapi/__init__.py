"""The documentation of the server's routes: `/openapi.json`, and `/docs` for people. Start with `operation.py`."""
