"""EndedConnections: connections that the port has ended, for as long as their process may copy."""

from kvtier.sidecar.port import Client
from kvtier.sidecar.quarantine import Lifeline


class EndedConnections:
    """The sidecar's ends of connections that the port reads no more, kept open while workers of theirs may copy.

    A worker's process closes its end when it ends, or when its client is closed, which waits for copies under way. To
    the client nothing is said: libzmq would close its end at once, whatever the worker's other threads do. Owned by the
    door's thread.
    """

    def __init__(self) -> None:
        self._lifelines: dict[Client[list[bytes]], Lifeline] = {}

    def add(self, client: Client[list[bytes]], *, is_watched: bool) -> None:
        """Take over the connection of *client*, which is closed at once unless it *is_watched*."""
        if is_watched:
            self._lifelines[client] = Lifeline(client.connection)
        else:
            client.connection.close()

    def is_cut(self, client: Client[list[bytes]]) -> bool:
        """Return whether the client's processes have closed the connection."""
        if client.is_open:
            return False
        lifeline = self._lifelines.get(client)
        if lifeline is not None and not lifeline.is_cut:
            return False
        self._lifelines.pop(client, None)
        return True

    def close(self) -> None:
        """Close what is still open."""
        for lifeline in self._lifelines.values():
            lifeline.close()
        self._lifelines.clear()
