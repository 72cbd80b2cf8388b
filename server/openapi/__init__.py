"""What the server tells of its own routes: `/openapi.json`, and `/docs` for people. Start with `operation.py`."""
