"""DocumentPrefills: documents being computed, one after the other, whenever no question is."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.engine.core import EngineCore
from kvtier.engine.documents.document import Document
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.request import FinishReason, Request
from kvtier.engine.scheduling.request_options import RequestOptions
from kvtier.tiers.naming.block_hash import ExtraKeys

PRIORITY = 101  # behind all that a request may ask for; lower is more urgent
ORDINARY = 0  # what a request has that asks for nothing
PATIENCE_S = 60.0  # without a token computed, after which a document is a request like others
_BEHIND_ALL = RequestOptions(priority=PRIORITY)
_ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


@dataclass(eq=False, slots=True)
class _Running:
    document: Document
    request: Request
    patient_until: float
    num_computed: int = 0  # most tokens so far


class DocumentPrefills:
    """A queue of which one document at a time is a request, with a low priority: tenant by tenant, and a tenant's in
    the order in which they came.

    One for which nothing could be computed for a minute is an ordinary request from then on: it waits for those that
    came before it, and not for all that are to come. Owned by the engine's thread.
    """

    def __init__(
        self,
        core: EngineCore,
        extra_of: Callable[[Document], ExtraKeys],
        ended: Callable[[Document, str | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*extra_of*: what a document's blocks are named with beside its tokens. *ended* is told of every document that
        is done, with the reason if that is because it cannot be computed."""
        self._core = core
        self._extra_of = extra_of
        self._ended = ended
        self._clock = clock
        self._queue: deque[Document] = deque()
        self._running: _Running | None = None
        self._num_begun = 0
        self._begun: dict[str | None, int] = {}  # by tenant: the number of its last one

    def add(self, document: Document) -> None:
        """Compute it in its turn, or load it, as far as it is not on the device. One that waits already waits once."""
        if not self.has(document):
            self._queue.append(document)

    def has(self, document: Document) -> bool:
        """Whether it waits or is being computed."""
        return document in self._queue or self.is_running(document)

    def is_running(self, document: Document) -> bool:
        """Whether it is being computed."""
        return self._running is not None and self._running.document is document

    @property
    def num_computed(self) -> int:
        """Tokens done of the document that is being computed; fewer again when it had to give way."""
        if self._running is None:
            return 0
        return min(self._running.request.num_computed, self._running.document.num_tokens)

    def remove(self, document: Document) -> None:
        """Forget it; what is computed of it stays cached."""
        if document in self._queue:
            self._queue.remove(document)
        if self._running is not None and self._running.document is document:
            self._core.abort(self._running.request)
            self._running = None

    def end(self) -> None:
        """Forget all of them."""
        self._queue.clear()
        if self._running is not None:
            self.remove(self._running.document)

    def tick(self) -> None:
        """Take in that a document is done, and begin with the next."""
        if self._running is not None and (reason := self._running.request.finish_reason) is not None:
            document, self._running = self._running.document, None
            self._ended(document, "it was aborted" if reason is FinishReason.ABORT else None)
        elif self._running is not None:
            self._hurry(self._running)
        most_waiting = self._core.config.scheduler.max_waiting
        while self._running is None and self._queue and self._core.num_waiting < most_waiting:
            document = min(self._queue, key=lambda each: self._begun.get(each.tenant, 0))  # the first of several
            self._queue.remove(document)
            self._num_begun += 1
            self._begun[document.tenant] = self._num_begun
            self._begin(document)

    def _begin(self, document: Document) -> None:
        try:
            extra = self._extra_of(document)
            request = self._core.add(document.token_ids.tolist(), _ONE_TOKEN, extra, time.monotonic(), _BEHIND_ALL)
        except ValueError as error:
            self._ended(document, str(error))
        else:
            self._running = _Running(document, request, self._clock() + PATIENCE_S)

    def _hurry(self, running: _Running) -> None:
        """Let it wait no longer behind all others if it does not get on."""
        num_computed = running.request.num_computed
        if num_computed > running.num_computed:
            running.num_computed, running.patient_until = num_computed, self._clock() + PATIENCE_S
        elif running.request.options.priority > ORDINARY and self._clock() >= running.patient_until:
            self._core.set_priority(running.request, ORDINARY)
