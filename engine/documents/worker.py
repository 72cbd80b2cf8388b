"""DocumentShelf: what the engine does for documents, and what it knows of them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvtier.engine.core import EngineCore
from kvtier.engine.documents.document import Document
from kvtier.engine.documents.pin_shares import PinShares
from kvtier.engine.documents.pins import DocumentPins
from kvtier.engine.documents.prefills import DocumentPrefills
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys
from kvtier.tiers.naming.tier import Tier


class Status(StrEnum):
    """How far a document is."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    READY = "ready"  # all of it is cached, in some tier
    EVICTED = "evicted"  # it was ready; some of it is in no tier any more
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Residence:
    """Where a document is at one moment, by value. Tokens count for the warmest tier that has them."""

    status: Status
    error: str | None
    num_computed: int  # tokens, while it is prefilling; else all or none
    tokens: Mapping[str, int]  # by tier, and "nowhere"
    num_bytes: Mapping[str, int]  # by tier
    load_s: float | None  # until it would be on the device, as lanes and their queues are; None: not known yet
    compute_s: float | None  # to compute all of it anew; None: not known yet
    is_warming: bool  # on its way to host memory
    is_held: bool  # all of it is in host memory, and will be as long as it is pinned


class DocumentWorker:
    """Owned by the engine's thread, which calls `look` after every step."""

    def __init__(
        self,
        extra_of: Callable[[EngineCore, Document], ExtraKeys],
        became_ready: Callable[[Document], None],
        shares: PinShares,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*extra_of*: what a document's blocks are named with beside its tokens. *became_ready* is told when one has
        been computed."""
        self._extra_of = extra_of
        self._became_ready = became_ready
        self._chains: dict[Document, BlockChain] = {}
        self._errors: dict[Document, str] = {}
        self._was_ready: set[Document] = set()
        self._prefills = DocumentPrefills(extra_of, self._ended, clock)
        self._pins = DocumentPins(self._chain, self._compute, shares, clock)

    def add(self, core: EngineCore, document: Document) -> None:
        """A document that is new here: compute it unless it has been and nothing of it is wanted now."""
        if document.was_ready:
            self._was_ready.add(document)
        else:
            self._compute(document)

    def warm(self, core: EngineCore, document: Document, tier: Tier) -> None:
        """Bring it to the device or to host memory, and compute what is nowhere. NoRoomToPin."""
        if tier is Tier.DEVICE:
            self._compute(document)
        else:
            self._pins.warm(core, document)

    def pin(self, core: EngineCore, document: Document, ttl_s: float, must_have_room: bool = True) -> None:
        """Keep it in host memory for so long from now on. NoRoomToPin, unless it may wait for room."""
        self._pins.pin(core, document, ttl_s, must_have_room)

    def unpin(self, core: EngineCore, document: Document) -> None:
        """Keep it no longer."""
        self._pins.unpin(core, document)

    def drop(self, core: EngineCore, document: Document) -> None:
        """Forget it. Its blocks stay cached until others need their room."""
        self._prefills.remove(core, document)
        self._pins.drop(core, document)
        self._chains.pop(document, None)
        self._errors.pop(document, None)
        self._was_ready.discard(document)

    def end(self, core: EngineCore) -> None:
        """Forget all of them."""
        self._prefills.end(core)
        self._pins.end(core)

    def tick(self, core: EngineCore) -> None:
        """Go on with all that is to be done."""
        self._prefills.tick(core)
        self._pins.tick(core)

    def residence(self, core: EngineCore, document: Document) -> Residence:
        """Where it is now."""
        chain = self._chain(core, document)
        hit = core.cache.lookup(chain, document.num_tokens + 1)
        tokens = dict.fromkeys([*map(str, Tier), "nowhere"], 0)
        for tier in core.cache.where(chain):
            tokens["nowhere" if tier is None else str(tier)] += chain.block_size
        tokens["nowhere"] += document.num_tokens % chain.block_size
        status = self._status(document, is_whole=hit.num_tokens == hit.limit)
        num_done = {Status.READY: document.num_tokens, Status.PREFILLING: self._prefills.num_computed}
        planner = core.planner
        compute_s = planner.compute_seconds(0, document.num_tokens) if planner.prefill.is_known else None
        return Residence(
            status,
            self._errors.get(document),
            num_done.get(status, 0),
            tokens,
            {str(tier): round(tokens[str(tier)] * core.bytes_per_token) for tier in Tier},
            core.cache.load_seconds(hit, planner),
            compute_s,
            self._pins.is_warming(document),
            self._pins.is_held(document),
        )

    def _status(self, document: Document, *, is_whole: bool) -> Status:
        if self._prefills.has(document):
            return Status.PREFILLING if self._prefills.is_running(document) else Status.QUEUED
        if document in self._errors:
            return Status.FAILED
        return Status.READY if is_whole else Status.EVICTED

    def _compute(self, document: Document) -> None:
        self._errors.pop(document, None)
        self._prefills.add(document)

    def _ended(self, document: Document, error: str | None) -> None:
        if error is not None:
            self._errors[document] = error
        elif document not in self._was_ready:
            self._was_ready.add(document)
            self._became_ready(document)

    def _chain(self, core: EngineCore, document: Document) -> BlockChain:
        if document not in self._chains:
            self._chains[document] = core.chain(document.token_ids.tolist(), self._extra_of(core, document))
        return self._chains[document]
