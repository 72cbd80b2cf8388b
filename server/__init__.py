"""`kvtier serve`: the engine behind HTTP, with OpenAI's API and Anthropic's. Start reading with `http_server.py`."""
