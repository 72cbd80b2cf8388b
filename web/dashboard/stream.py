"""The live stream of events to all viewers of the dashboard page."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import msgspec

GONE = b": the server ends\n\n"


class TooManyViewers(Exception):
    """An error for a new viewer when the maximum number of viewers is already connected."""


def event(name: str, content: object) -> bytes:
    """Return a server-sent event with *content* as one line of JSON."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"


class Stream:
    """A stream of events to all viewers. Each event is encoded only once. Owned by the event loop.

    Events are not queued: a slow viewer misses some events and gets the newest one next. Some events go only to the
    viewers of one group, for example a tenant's requests only to that tenant.
    """

    def __init__(self, max_viewers: int) -> None:
        self._max_viewers = max_viewers
        self._first = b""
        self._latest = b""
        self._number = 0
        self._own: dict[str | None, tuple[int, bytes]] = {}  # by group: sequence number and event
        self._groups: dict[str | None, int] = {}  # number of viewers by group
        self._changed = asyncio.Event()
        self._has_ended = False

    @property
    def num_viewers(self) -> int:
        """Number of viewers."""
        return sum(self._groups.values())

    @property
    def groups(self) -> tuple[str | None, ...]:
        """Groups, such as tenants, that have at least one viewer now."""
        return tuple(self._groups)

    @property
    def unsent_groups(self) -> tuple[str | None, ...]:
        """Groups, such as tenants, that have viewers but no event from `publish_to` yet."""
        return tuple(group for group in self._groups if group not in self._own)

    def begin_with(self, first: bytes) -> None:
        """Set the event that each new viewer gets first."""
        self._first = first

    def publish(self, latest: bytes) -> None:
        """Send *latest* to all viewers. Viewers that have not read the previous event yet never get that one."""
        self._latest = latest
        self._tell()

    def publish_to(self, group: str | None, latest: bytes) -> None:
        """Send *latest* to all viewers of *group*, such as a tenant, unless it equals the group's previous event."""
        if group in self._groups and self._own.get(group, (0, b""))[1] != latest:
            self._own[group] = (self._number + 1, latest)
            self._tell()

    def end(self) -> None:
        """End the streams of all current and future viewers."""
        self._has_ended = True
        self._tell()

    @contextmanager
    def viewer(self, group: str | None) -> Iterator[AsyncIterator[bytes]]:
        """Register a viewer while the context lasts, and return its events. Raise `TooManyViewers` above the limit."""
        if self.num_viewers >= self._max_viewers:
            raise TooManyViewers(
                f"{self._max_viewers} viewers are connected; close one, or raise dashboard.max_viewers"
            )
        self._groups[group] = self._groups.get(group, 0) + 1
        try:
            yield self._events(group)
        finally:
            self._groups[group] -= 1
            if not self._groups[group]:
                del self._groups[group]
                self._own.pop(group, None)
            if not self._groups:
                self._latest = b""  # nothing is published without viewers, so the next viewer would get an old event

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
