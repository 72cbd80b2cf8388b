"""PastRequests: what is kept of the newest requests, to explain them when somebody asks."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvtier.engine.observability.explain.prompt_print import PromptPrint
from kvtier.engine.observability.explain.seen_contents import Way
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.trail import Trail
from kvtier.tiers.device.ghosts import Ghosts

MAX_REQUESTS = 4096
MAX_TOKENS = 4 << 20  # of their prompts: a few bytes each
MAX_OF_ID = 128  # requests that a question for one id is about: as many as one HTTP request has completions


@dataclass(frozen=True, slots=True)
class Past:
    """One request that has ended, in names and numbers."""

    record: RequestRecord
    trail: Trail
    prompt: PromptPrint
    way: Way
    ghosts: Ghosts  # of the tiers that it was looked up in
    before: int  # prompts that had been known by then, see `KnownPrompts.older`
    seen_before: int  # see `SeenContents.differing`


class PastRequests:
    """The newest ones, bounded; the completions of one HTTP request have its id in common. Owned by one thread."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Past] = OrderedDict()
        self._by_id: dict[str, list[int]] = {}
        self._num_tokens = 0
        self._next = 0

    def add(self, past: Past) -> None:
        """Keep a request that has ended."""
        self._requests[self._next] = past
        self._by_id.setdefault(past.record.request_id, []).append(self._next)
        self._next += 1
        self._num_tokens += past.prompt.num_tokens
        while len(self._requests) > MAX_REQUESTS or self._num_tokens > MAX_TOKENS:
            self._drop_oldest()

    def find(self, request_id: str, tenant: str | None) -> list[Past]:
        """Return the tenant's newest `MAX_OF_ID` with this id, the first that ended first. Clients choose the ids of
        their requests, and may give all of them the same one."""
        found = (self._requests[number] for number in reversed(self._by_id.get(request_id, ())))
        newest = list(islice((past for past in found if past.record.tenant == tenant), MAX_OF_ID))
        return newest[::-1]

    def all(self) -> Sequence[Past]:
        """Return all that are kept, the first that ended first."""
        return list(self._requests.values())

    def _drop_oldest(self) -> None:
        number, past = self._requests.popitem(last=False)
        self._num_tokens -= past.prompt.num_tokens
        numbers = self._by_id[past.record.request_id]
        numbers.remove(number)
        if not numbers:
            del self._by_id[past.record.request_id]
