"""Conversations: finds recent chats that began with the same message, even if they were rendered differently."""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec

from kvtier.server.chat_request import Message

MAX_CONVERSATIONS = 4096
MAX_ALIKE = 8  # requests to remember for each digest, the newest ones
_DIGEST_BYTES = 16


class Conversations:
    """An index of recent chat requests, to find other requests of the same conversation.

    For each request, it stores a digest of the first message and a digest of all messages. Both lead to the request's
    id. No text is stored. Owned by the event loop.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()  # digests by request
        self._alike: dict[bytes, deque[str]] = {}

    def add(self, request_id: str, tenant: str | None, messages: Sequence[Message]) -> None:
        """Add a request. It replaces an earlier request with the same id."""
        self._drop(request_id)
        digests = _digests(tenant, messages)
        self._requests[request_id] = digests
        for digest in digests:
            self._alike.setdefault(digest, deque(maxlen=MAX_ALIKE)).append(request_id)
        if len(self._requests) > MAX_CONVERSATIONS:
            self._drop(next(iter(self._requests)))

    def alike(self, request_id: str) -> list[str]:
        """Return the ids of other requests of the same tenant that began with the same message as *request_id*."""
        return self._named(self._requests.get(request_id, ()), request_id)

    def requests_like(self, tenant: str | None, messages: Sequence[Message]) -> list[str]:
        """Return the ids of the tenant's requests that began with the same message as *messages*."""
        return self._named(_digests(tenant, messages), "")

    def _named(self, digests: Sequence[bytes], besides: str) -> list[str]:
        found = [request_id for digest in digests for request_id in self._alike.get(digest, ())]
        return [request_id for request_id in dict.fromkeys(found) if request_id != besides]

    def _drop(self, request_id: str) -> None:
        for digest in self._requests.pop(request_id, ()):
            alike = self._alike[digest]
            if request_id in alike:
                alike.remove(request_id)
            if not alike:
                del self._alike[digest]


def _digests(tenant: str | None, messages: Sequence[Message]) -> tuple[bytes, ...]:
    first, *rest = (msgspec.json.encode([tenant, message.for_template()]) for message in messages)
    running = hashlib.blake2b(first, digest_size=_DIGEST_BYTES)
    digests = [running.copy().digest()]
    for message in rest:
        running.update(message)
    return tuple(dict.fromkeys([*digests, running.digest()]))
