"""Tools in chats: what a request says of them, how families of models write calls, and how calls are read."""
