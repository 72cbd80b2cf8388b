"""What a server is asked, and what it may say."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")


class Command(NamedTuple):
    """A command. If it is about a key, that is its first argument."""

    name: bytes
    arguments: tuple[bytes | memoryview, ...] = ()

    @property
    def key(self) -> bytes:
        """The key that it is about."""
        return bytes(self.arguments[0])

    @property
    def num_bytes(self) -> int:
        """Bytes that are sent for it, about."""
        return sum(map(len, self.arguments))


Reply: TypeAlias = "memoryview | bytes | int | list[Reply] | Exception | None"
"""What came for a command: a value, a status, a number, nothing, a list; or the reason why there is no answer, an error
of redis-py's: the server's refusal (`ResponseError`), or that of the connection."""


def batches(items: Iterable[T], bytes_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """The *items* in their order, in lists of about *max_bytes*."""
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
