"""Tools in chats: their description in requests, how model families write calls, and how calls are read."""
