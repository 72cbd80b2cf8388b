"""DocumentPrefills: computes documents one after the other, behind all requests of clients."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.engine.core import EngineCore
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.request import FinishReason, Request, RequestOptions
from kvtier.server.documents.document import Document
from kvtier.tiers.naming.block_hash import ExtraKeys

PRIORITY = 101  # behind every priority that a client may ask for; lower is more urgent
ORDINARY = 0  # the priority of a request that asks for none
PATIENCE_S = 60.0  # after so long without a token computed a document gets the ordinary priority
_BEHIND_ALL = RequestOptions(priority=PRIORITY)
_ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


@dataclass(eq=False, slots=True)
class _Running:
    document: Document
    request: Request
    patient_until: float
    num_computed: int = 0  # the most tokens it has had computed


class DocumentPrefills:
    """A queue of documents, one of which at a time is a request of low priority: tenant by tenant, each in its order.

    A document of which no token was computed for a minute becomes a request of ordinary priority: it waits for those
    that came before it, and not for all that are to come. Owned by the engine's thread.
    """

    def __init__(
        self,
        core: EngineCore,
        extra_of: Callable[[Document], ExtraKeys],
        on_ended: Callable[[Document, str | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*extra_of* gives what a document's blocks are named with beside its tokens.

        *on_ended* is called with each document that is done, and with the reason if it could not be computed.
        """
        self._core = core
        self._extra_of = extra_of
        self._on_ended = on_ended
        self._clock = clock
        self._queue: deque[Document] = deque()
        self._running: _Running | None = None
        self._num_begun = 0
        self._begun: dict[str | None, int] = {}  # by tenant: the number of the document begun last

    def add(self, document: Document) -> None:
        """Queue a document, unless it waits already: its turn brings it to the device, by loading and computing."""
        if not self.has(document):
            self._queue.append(document)

    def has(self, document: Document) -> bool:
        """Whether the document waits or is being computed."""
        return document in self._queue or self.is_running(document)

    def is_running(self, document: Document) -> bool:
        """Whether the document is being computed."""
        return self._running is not None and self._running.document is document

    @property
    def num_computed(self) -> int:
        """Tokens done of the document that is being computed; fewer again after it was preempted."""
        if self._running is None:
            return 0
        return min(self._running.request.num_computed, self._running.document.num_tokens)

    def remove(self, document: Document) -> None:
        """Take a document out of the queue, or abort its request; what is computed of it stays cached."""
        if document in self._queue:
            self._queue.remove(document)
        if self._running is not None and self._running.document is document:
            self._core.abort(self._running.request)
            self._running = None

    def end(self) -> None:
        """Take all documents out, and abort the one that is being computed."""
        self._queue.clear()
        if self._running is not None:
            self.remove(self._running.document)

    def tick(self) -> None:
        """Report a document that is done, and begin with the next one."""
        if self._running is not None and (reason := self._running.request.finish_reason) is not None:
            document, self._running = self._running.document, None
            self._on_ended(document, "it was aborted" if reason is FinishReason.ABORT else None)
        elif self._running is not None:
            self._hurry(self._running)
        max_waiting = self._core.config.scheduler.max_waiting
        while self._running is None and self._queue and self._core.num_waiting < max_waiting:
            document = min(self._queue, key=lambda each: self._begun.get(each.tenant, 0))  # of equals the first
            self._queue.remove(document)
            self._num_begun += 1
            self._begun[document.tenant] = self._num_begun
            self._begin(document)

    def _begin(self, document: Document) -> None:
        try:
            extra = self._extra_of(document)
            request = self._core.add(document.token_ids.tolist(), _ONE_TOKEN, extra, time.monotonic(), _BEHIND_ALL)
        except ValueError as error:
            self._on_ended(document, str(error))
        else:
            self._running = _Running(document, request, self._clock() + PATIENCE_S)

    def _hurry(self, running: _Running) -> None:
        """Give a document the ordinary priority if no token of it was computed for a minute."""
        num_computed = running.request.num_computed
        if num_computed > running.num_computed:
            running.num_computed, running.patient_until = num_computed, self._clock() + PATIENCE_S
        elif running.request.options.priority > ORDINARY and self._clock() >= running.patient_until:
            self._core.set_priority(running.request, ORDINARY)
