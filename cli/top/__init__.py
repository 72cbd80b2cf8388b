"""The `kvtier top` command, which shows the state of a server or sidecar in a terminal.

`command.py` reads the state and the keyboard. `server_view.py` and `sidecar_view.py` turn the state into tables.
"""
