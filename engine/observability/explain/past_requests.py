"""PastRequests: a bounded memory of the newest finished requests, from which they can be explained."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvtier.engine.observability.explain.prompt_print import PromptFingerprint
from kvtier.engine.observability.explain.seen_contents import Way
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.trail import Trail
from kvtier.tiers.device.ghosts import Ghosts

MAX_REQUESTS = 4096
MAX_TOKENS = 4 << 20  # of all prompts together; a token takes a few bytes
MAX_OF_ID = 128  # requests returned for one id; an HTTP request has at most as many completions


@dataclass(frozen=True, slots=True)
class Past:
    """The facts about a finished request that are kept to explain it later. They do not include its text."""

    record: RequestRecord
    trail: Trail
    prompt: PromptFingerprint
    way: Way
    ghosts: Ghosts  # blocks evicted from the tiers in which the request's prefix was looked up
    before: int  # number of prompts added to `KnownPrompts` when the request was looked up, see `KnownPrompts.older`
    seen_before: int  # `SeenContents.num_added` when the request ended, see `SeenContents.differing`


class PastRequests:
    """A bounded memory of the engine's finished requests. Owned by one thread.

    An HTTP request may have several completions. Each is a request of the engine, and all of them have the same id.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Past] = OrderedDict()
        self._by_id: dict[str, list[int]] = {}
        self._num_tokens = 0
        self._next = 0

    def add(self, past: Past) -> None:
        """Add a finished request, dropping the oldest ones if there are too many."""
        self._requests[self._next] = past
        self._by_id.setdefault(past.record.request_id, []).append(self._next)
        self._next += 1
        self._num_tokens += past.prompt.num_tokens
        while len(self._requests) > MAX_REQUESTS or self._num_tokens > MAX_TOKENS:
            self._drop_oldest()

    def find(self, request_id: str, tenant: str | None) -> list[Past]:
        """Return the tenant's newest `MAX_OF_ID` requests with this id, in the order in which they ended.

        Clients choose request ids, and may use the same id for all of their requests.
        """
        found = (self._requests[number] for number in reversed(self._by_id.get(request_id, ())))
        newest = list(islice((past for past in found if past.record.tenant == tenant), MAX_OF_ID))
        return newest[::-1]

    def all(self) -> Sequence[Past]:
        """Return all requests in the order in which they ended."""
        return list(self._requests.values())

    def _drop_oldest(self) -> None:
        number, past = self._requests.popitem(last=False)
        self._num_tokens -= past.prompt.num_tokens
        numbers = self._by_id[past.record.request_id]
        numbers.remove(number)
        if not numbers:
            del self._by_id[past.record.request_id]
