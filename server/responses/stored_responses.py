"""StoredResponses: the newest responses of each tenant, in memory, so that clients can continue and read them."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from kvtier.server.responses.items import Item

_ITEM_BYTES = 48  # memory that a conversation needs for each item, in addition to the item's JSON


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, and its whole *conversation*: the items before it, its input, and its output, each as JSON.

    The conversation has no instructions.
    """

    content: bytes
    conversation: tuple[bytes, ...]

    def items(self) -> list[Item]:
        """Return the items of the conversation."""
        return [msgspec.json.decode(item, type=Item) for item in self.conversation]

    @property
    def num_bytes(self) -> int:
        """Size in memory. Items that several responses of one conversation share count for each of these responses."""
        return len(self.content) + sum(len(item) + _ITEM_BYTES for item in self.conversation)


def encoded(items: Iterable[msgspec.Struct]) -> tuple[bytes, ...]:
    """Return *items*, of a request or of an answer, as JSON texts for a `StoredResponse`."""
    return tuple(map(msgspec.json.encode, items))


class _Shelf:
    """The responses of one tenant in the order of their last use, and their total size."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def pop(self, response_id: str) -> StoredResponse | None:
        found = self.responses.pop(response_id, None)
        self.num_bytes -= 0 if found is None else found.num_bytes
        return found

    def put(self, response_id: str, response: StoredResponse) -> None:
        self.pop(response_id)
        self.responses[response_id] = response
        self.num_bytes += response.num_bytes


class StoredResponses:
    """The stored responses of all tenants. Owned by the event loop.

    Each tenant may have *max_responses* responses and *max_bytes* bytes. Beyond that, the tenant's least recently used
    responses are evicted. Each response has its whole conversation, so a conversation can continue although its earlier
    responses were evicted or deleted. A tenant cannot find the responses of another tenant.
    """

    def __init__(self, max_responses: int, max_bytes: int, num_tenants: Callable[[], int]) -> None:
        """Create an empty store. *num_tenants* returns how many tenants there are now.

        If API keys were replaced and more tenants than that have responses, the store forgets the least recently used
        tenants.
        """
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_tenants = num_tenants
        self._shelves: OrderedDict[str | None, _Shelf] = OrderedDict()

    def put(self, tenant: str | None, response_id: str, response: StoredResponse) -> bool:
        """Store a response of a tenant. Return False if it does not fit, even into an empty store."""
        if response.num_bytes > self._max_bytes or not self._max_responses:
            return False
        shelf = self._shelves.setdefault(tenant, _Shelf())
        self._shelves.move_to_end(tenant)
        shelf.put(response_id, response)
        while len(shelf.responses) > self._max_responses or shelf.num_bytes > self._max_bytes:
            shelf.pop(next(iter(shelf.responses)))
        while len(self._shelves) > max(1, self._num_tenants()):
            self._shelves.popitem(last=False)
        return True

    def find(self, tenant: str | None, response_id: str) -> StoredResponse | None:
        """Return a response of the tenant, or None if it is not stored. The response becomes the last used one."""
        shelf = self._shelves.get(tenant)
        if shelf is None or response_id not in shelf.responses:
            return None
        self._shelves.move_to_end(tenant)
        shelf.responses.move_to_end(response_id)
        return shelf.responses[response_id]

    def delete(self, tenant: str | None, response_id: str) -> bool:
        """Delete a response of the tenant. Return False if it is not stored."""
        shelf = self._shelves.get(tenant)
        return shelf is not None and shelf.pop(response_id) is not None
