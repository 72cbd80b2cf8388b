"""`kvtier serve`: the engine behind HTTP, with OpenAI's API. Start reading with `http_server.py`."""
