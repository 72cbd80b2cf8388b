"""Feeds: what listens to replicas that come and go."""

import asyncio
from collections.abc import Callable

from kvtier.routing.event_feed import EventFeed
from kvtier.routing.kv_event import Batch
from kvtier.routing.publisher import Publisher


class Feeds:
    """A task for each publisher that is listened to. Owned by the event loop."""

    def __init__(self) -> None:
        self._tasks: dict[Publisher, asyncio.Task[None]] = {}

    def listen(self, publisher: Publisher, take: Callable[[Batch], None], lose: Callable[[], None]) -> None:
        """Listen from now on; nothing happens if that is so already."""
        if publisher not in self._tasks:
            self._tasks[publisher] = asyncio.get_running_loop().create_task(EventFeed(publisher, take, lose).run())

    def end(self, name: str) -> None:
        """Listen no longer to the replica of that name."""
        for publisher in [each for each in self._tasks if each.name == name]:
            self._tasks.pop(publisher).cancel()
