"""Anthropic's Messages API, in addition to OpenAI's, for the same engine. Start reading with `routes.py`."""
