"""Anthropic's Messages API over the same engine. Start reading with `routes.py`."""
