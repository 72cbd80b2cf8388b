"""Tool calls in chats: the tools of a request, the call formats of model families, and parsers of calls in answers."""
