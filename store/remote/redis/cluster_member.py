"""`ClusterMember`: a client of one node of a cluster, with threads of its own."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import TimeoutError as NoAnswer

from kvtier.store.remote.redis.command import Command, Reply
from kvtier.store.remote.redis.node import RedisNode
from kvtier.store.remote.redis_settings import Address, RedisSettings

_PING = Command(b"PING")


class ClusterMember:
    """A client of one node of a cluster. If the node is silent, calls to other nodes are not delayed.

    After a call without any reply, the node *rests*: further calls fail at once, until the node has answered a ping
    that is sent in the background. Each node has its own threads, one per connection. So calls that wait for a silent
    node block no thread of another node.
    """

    def __init__(self, address: Address, settings: RedisSettings) -> None:
        self.node = RedisNode(address, settings)
        self.rests = False
        self._threads = ThreadPoolExecutor(settings.num_connections, f"redis {address}")
        self._pinging: Future[list[Reply]] | None = None

    def ask(self, commands: Sequence[Command], until: float) -> "Future[list[Reply]]":
        """Send *commands* in a background thread and return the future replies; see `RedisNode.ask`.

        If the last commands got no reply at all, send only a ping and return errors at once, until a ping is answered.
        """
        if self.rests:
            self._ping(until)
            return self._silent(commands)
        try:
            return self._threads.submit(self._ask, commands, until)
        except RuntimeError:  # closed, because the node has left the cluster
            return self._silent(commands)

    def close(self) -> None:
        """Close the connections. Does not wait for the threads, which end soon after."""
        self.node.close()
        self._threads.shutdown(wait=False)  # queued calls find the node closed

    def _ask(self, commands: Sequence[Command], until: float) -> list[Reply]:
        replies = self.node.ask(commands, until)
        self.rests = all(is_no_reply(reply) for reply in replies)
        return replies

    def _ping(self, until: float) -> None:
        if self._pinging is None or self._pinging.done():
            with suppress(RuntimeError):
                self._pinging = self._threads.submit(self._ask, [_PING], until)

    def _silent(self, commands: Sequence[Command]) -> "Future[list[Reply]]":
        answered: Future[list[Reply]] = Future()
        answered.set_result([NoAnswer(f"{self.node.address} does not answer")] * len(commands))
        return answered


def is_no_reply(reply: Reply) -> bool:
    """Return whether the server did not reply, because it is down or hangs. A refusal is a reply."""
    return isinstance(reply, NoConnection | NoAnswer) and not isinstance(reply, AuthenticationError)
