"""DocumentPrefills: computes the KV of documents in the background, at a lower priority than clients' requests."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.engine.core import EngineCore
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.request import FinishReason, Request, RequestOptions
from kvtier.server.documents.document import Document
from kvtier.tiers.naming.block_hash import ExtraKeys

PRIORITY = 101  # less urgent than every priority that a client may ask for; lower is more urgent
ORDINARY = 0  # the priority of a request that asks for none
PATIENCE_S = 60.0  # a document without progress for this long gets the ordinary priority
_BEHIND_ALL = RequestOptions(priority=PRIORITY)
_ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


@dataclass(eq=False, slots=True)
class _Running:
    document: Document
    request: Request
    patient_until: float
    num_computed: int = 0  # the maximum so far


class DocumentPrefills:
    """A queue of documents whose KV is computed one document at a time. Owned by the engine's thread.

    Tenants take turns, and the documents of one tenant keep their order. Each document is a request of low priority. If
    it makes no progress for a minute, it gets the ordinary priority, so that newer requests cannot delay it further.
    """

    def __init__(
        self,
        core: EngineCore,
        extra_of: Callable[[Document], ExtraKeys],
        on_ended: Callable[[Document, str | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty queue.

        *extra_of* returns the adapter and cache_salt with which a document's blocks are hashed. *on_ended* is called
        when the computation of a document has ended, with the document and the reason for the failure. The reason is
        None if the computation has succeeded.
        """
        self._core = core
        self._extra_of = extra_of
        self._on_ended = on_ended
        self._clock = clock
        self._queue: deque[Document] = deque()
        self._running: _Running | None = None
        self._num_begun = 0
        self._begun: dict[str | None, int] = {}  # by tenant: the number of its last started document

    def add(self, document: Document) -> None:
        """Queue a document, to load its cached blocks to the device and compute the rest."""
        if not self.has(document):
            self._queue.append(document)

    def has(self, document: Document) -> bool:
        """Return whether the document is queued or being computed."""
        return document in self._queue or self.is_running(document)

    def is_running(self, document: Document) -> bool:
        """Return whether the document is the one that is being computed."""
        return self._running is not None and self._running.document is document

    @property
    def num_computed(self) -> int:
        """Number of tokens whose KV is on the device, of the document that is being computed; 0 if there is none.

        Preemption lowers the number.
        """
        if self._running is None:
            return 0
        return min(self._running.request.num_computed, self._running.document.num_tokens)

    def remove(self, document: Document) -> None:
        """Remove a document from the queue, or abort its request. Blocks that were already computed stay cached."""
        if document in self._queue:
            self._queue.remove(document)
        if self._running is not None and self._running.document is document:
            self._core.abort(self._running.request)
            self._running = None

    def end(self) -> None:
        """Remove all documents from the queue, and abort the computation in progress."""
        self._queue.clear()
        if self._running is not None:
            self.remove(self._running.document)

    def tick(self) -> None:
        """Report a computation that has ended, and start the next one. Called after every engine step."""
        if self._running is not None and (reason := self._running.request.finish_reason) is not None:
            document, self._running = self._running.document, None
            self._on_ended(document, "it was aborted" if reason is FinishReason.ABORT else None)
        elif self._running is not None:
            self._hurry(self._running)
        max_waiting = self._core.config.scheduler.max_waiting
        while self._running is None and self._queue and self._core.num_waiting < max_waiting:
            document = min(self._queue, key=lambda each: self._begun.get(each.tenant, 0))  # the first on a tie
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
        """Give the request the ordinary priority if it made no progress for a minute."""
        num_computed = running.request.num_computed
        if num_computed > running.num_computed:
            running.num_computed, running.patient_until = num_computed, self._clock() + PATIENCE_S
        elif running.request.options.priority > ORDINARY and self._clock() >= running.patient_until:
            self._core.set_priority(running.request, ORDINARY)
