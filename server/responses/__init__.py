"""OpenAI's Responses API, translated to chat completions, and the store of its responses. Start with `routes.py`."""
