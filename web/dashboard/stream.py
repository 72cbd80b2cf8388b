"""Stream: what all viewers of the page are sent, each second."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import msgspec

GONE = b": the server ends\n\n"


class TooManyViewers(Exception):
    """As many are watching as may; the message says so."""


def event(name: str, content: object) -> bytes:
    """A server-sent event; *content* becomes one line of JSON."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"


class Stream:
    """Events for any number of viewers, made once for all. A viewer that is slow gets the newest event next, and misses
    those in between: nothing is queued for anyone. Owned by the event loop.

    Beside what all see there is what viewers of one group see, such as a tenant's own requests.
    """

    def __init__(self, max_viewers: int) -> None:
        self._max_viewers = max_viewers
        self._first = b""
        self._latest = b""
        self._number = 0
        self._own: dict[str | None, tuple[int, bytes]] = {}  # by group, with the number it came with
        self._groups: dict[str | None, int] = {}  # how many watch
        self._changed = asyncio.Event()
        self._has_ended = False

    @property
    def num_viewers(self) -> int:
        """How many are watching."""
        return sum(self._groups.values())

    @property
    def groups(self) -> tuple[str | None, ...]:
        """The groups of which someone is watching."""
        return tuple(self._groups)

    @property
    def untold_groups(self) -> tuple[str | None, ...]:
        """Those of them that were told nothing of their own yet."""
        return tuple(group for group in self._groups if group not in self._own)

    def begin_with(self, first: bytes) -> None:
        """Send *first* to each viewer that comes, before all else."""
        self._first = first

    def publish(self, latest: bytes) -> None:
        """Send *latest* to all, in place of what was sent before."""
        self._latest = latest
        self._tell()

    def publish_to(self, group: str | None, latest: bytes) -> None:
        """Send *latest* to all viewers of a group, unless they have exactly that."""
        if group in self._groups and self._own.get(group, (0, b""))[1] != latest:
            self._own[group] = (self._number + 1, latest)
            self._tell()

    def end(self) -> None:
        """End every viewer's stream, now and from now on."""
        self._has_ended = True
        self._tell()

    @contextmanager
    def viewer(self, group: str | None) -> Iterator[AsyncIterator[bytes]]:
        """The stream of one viewer. `TooManyViewers`."""
        if self.num_viewers >= self._max_viewers:
            raise TooManyViewers(f"{self._max_viewers} are watching already; close a page, or raise max_viewers")
        self._groups[group] = self._groups.get(group, 0) + 1
        try:
            yield self._events(group)
        finally:
            self._groups[group] -= 1
            if not self._groups[group]:
                del self._groups[group]
                self._own.pop(group, None)
            if not self._groups:
                self._latest = b""  # for nobody it is not made anew, and the next one to come would get an old one

    async def _events(self, group: str | None) -> AsyncIterator[bytes]:
        yield self._first
        seen, seen_own, latest = 0, 0, b""
        while not self._has_ended:
            parts = []
            own_number, own = self._own.get(group, (0, b""))
            if self._latest and self._latest is not latest:
                latest = self._latest
                parts.append(latest)
            if own_number > seen_own:
                seen_own = own_number
                parts.append(own)
            seen = self._number
            if parts:
                yield b"".join(parts)
            if seen == self._number and not self._has_ended:
                await self._changed.wait()
        yield GONE

    def _tell(self) -> None:
        self._number += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
