"""Commands to a server, and the replies that it may send."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")


class Command(NamedTuple):
    """A command for a server. Its first argument is the key, if the command concerns one."""

    name: bytes
    arguments: tuple[bytes | memoryview, ...] = ()

    @property
    def key(self) -> bytes:
        """The key that the command concerns."""
        return bytes(self.arguments[0])

    @property
    def num_bytes(self) -> int:
        """Approximate number of bytes to send for the command."""
        return sum(map(len, self.arguments))


Reply: TypeAlias = "memoryview | bytes | int | list[Reply] | Exception | None"
"""The reply to a command: a value, a status, a number, nothing, or a list.

If there is none, an error of redis-py says why: the server's refusal (`ResponseError`) or an error of the connection.
"""


def batches(items: Iterable[T], bytes_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Yield the *items* in order, in lists. A list ends as soon as its items have *max_bytes* or more."""
    batch: list[T] = []
    num_bytes = 0
    for item in items:
        batch.append(item)
        num_bytes += bytes_of(item)
        if num_bytes >= max_bytes:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
