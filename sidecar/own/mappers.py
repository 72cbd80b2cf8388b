"""Mappers: processes that map the segment to copy for an engine which has its session at another connection."""

from kvtier.sidecar.port import Client, peer
from kvtier.sidecar.quarantine import Lifeline


class Mappers:
    """The connections of these processes, by engine. A connection that the sidecar has ended counts until the process
    has closed its end. Owned by the sidecar's thread."""

    def __init__(self) -> None:
        self._engines: dict[Client[bytes], bytes] = {}  # of connections that the port reads
        self._ended: list[tuple[bytes, str, Lifeline]] = []

    def __contains__(self, client: Client[bytes]) -> bool:
        return client in self._engines

    def add(self, client: Client[bytes], engine: bytes) -> None:
        """Take in that a process maps the segment for *engine*."""
        self._engines[client] = engine

    def on_gone(self, client: Client[bytes]) -> None:
        """Take in that the port has ended this connection."""
        ended = self._engines.pop(client), process_name(client), Lifeline.after_farewell(client.connection)
        self._ended.append(ended)
        self.poll()

    def names(self, engine: bytes) -> list[str]:
        """Return the names of the processes that map the segment for *engine*, for people."""
        self.poll()
        reading = [process_name(client) for client, its_engine in self._engines.items() if its_engine == engine]
        return reading + [name for its_engine, name, _ in self._ended if its_engine == engine]

    def poll(self) -> None:
        """Forget the connections that have been closed."""
        self._ended = [each for each in self._ended if not each[2].is_cut]

    def close(self) -> None:
        """Close what is still open."""
        for _, _, lifeline in self._ended:
            lifeline.close()
        self._ended.clear()


def process_name(client: Client[bytes]) -> str:
    """Return what people know the client's process by. The number is 0 for one of another pid namespace."""
    return f"process {peer(client.connection).pid}"
