"""`ClusterMember`: a node of a cluster, asked by threads of its own."""

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
    """A node that may be silent without keeping anybody from the others.

    Once it has answered nothing, it *rests*: calls do not wait for it any more, until it has answered to a ping, for
    which nobody waits. It has as many threads as connections, so what waits for it takes no thread of another node's.
    """

    def __init__(self, address: Address, settings: RedisSettings) -> None:
        self.node = RedisNode(address, settings)
        self.rests = False
        self._threads = ThreadPoolExecutor(settings.num_connections, f"redis {address}")
        self._pinging: Future[list[Reply]] | None = None

    def ask(self, commands: Sequence[Command], until: float) -> "Future[list[Reply]]":
        """See `RedisNode.ask`; while it rests nothing is asked but a ping."""
        if self.rests:
            self._ping(until)
            return self._silent(commands)
        try:
            return self._threads.submit(self._ask, commands, until)
        except RuntimeError:  # it was closed: it is none of the cluster's any more
            return self._silent(commands)

    def close(self) -> None:
        """End connections and, once they have noticed, threads."""
        self.node.close()
        self._threads.shutdown(wait=False)  # what waits for its turn finds the node closed

    def _ask(self, commands: Sequence[Command], until: float) -> list[Reply]:
        replies = self.node.ask(commands, until)
        self.rests = all(is_silence(reply) for reply in replies)
        return replies

    def _ping(self, until: float) -> None:
        if self._pinging is None or self._pinging.done():
            with suppress(RuntimeError):
                self._pinging = self._threads.submit(self._ask, [_PING], until)

    def _silent(self, commands: Sequence[Command]) -> "Future[list[Reply]]":
        answered: Future[list[Reply]] = Future()
        answered.set_result([NoAnswer(f"{self.node.address} does not answer")] * len(commands))
        return answered


def is_silence(reply: Reply) -> bool:
    """Whether the server said nothing, as it is away or hangs. One that refuses has said something."""
    return isinstance(reply, NoConnection | NoAnswer) and not isinstance(reply, AuthenticationError)
