"""What a server is asked, and what it may say."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")

VALUE_BYTES = 1 << 20  # as many as a value that is read is taken to have, before it is there
BATCH_BYTES = 16 << 20  # of values, in one pipeline: the server keeps what it answers in its memory until it is read


class Command(NamedTuple):
    """A command. If it is about a key, that is its first argument."""

    name: bytes
    arguments: tuple[bytes | memoryview, ...] = ()

    @property
    def key(self) -> bytes:
        """The key that it is about."""
        return bytes(self.arguments[0])

    @property
    def value_bytes(self) -> int:
        """Bytes that go over the network for it, about."""
        return VALUE_BYTES if self.name == b"GET" else sum(map(len, self.arguments))


Reply: TypeAlias = "memoryview | bytes | int | list[Reply] | Exception | None"
"""What came for a command: a value, a status, a number, nothing, a list; or the reason why there is no answer, an error
of redis-py's: the server's refusal (`ResponseError`), or that of the connection."""


def batches(items: Iterable[T], bytes_of: Callable[[T], int]) -> Iterator[list[T]]:
    """The *items* in their order, in lists of about `BATCH_BYTES`."""
    batch: list[T] = []
    num_bytes = 0
    for item in items:
        batch.append(item)
        num_bytes += bytes_of(item)
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
