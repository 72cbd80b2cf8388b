"""`kvtier serve`: the engine behind HTTP, as OpenAI's API has it. Start with `http_server.py`."""
