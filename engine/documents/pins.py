"""DocumentPins: documents kept in host memory: pinned ones for as long as they are, others until they have come."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.engine.core import EngineCore
from kvtier.engine.documents.document import Document
from kvtier.engine.documents.pin_shares import PinShares
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.pins import Pin

RENEW_S = 30.0  # so often it is looked whether a block has been lost
WARM_S = 600.0  # so long what comes to host memory may take
MOST_LOOKED_AT = 64  # documents, after a step: 50 us


class NoRoomToPin(Exception):
    """Host memory has no room to pin the document; says what to do."""


@dataclass(eq=False, slots=True)
class _Kept:
    """Why, until when, and with which pin; none while there is no room for one."""

    pin: Pin | None = None
    renew_at: float = 0.0
    pinned_until: float | None = None
    warming_until: float | None = None


class DocumentPins:
    """Pins within each tenant's share. Owned by the engine's thread."""

    def __init__(
        self,
        chain_of: Callable[[EngineCore, Document], BlockChain],
        compute: Callable[[Document], None],
        shares: PinShares,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*compute* is asked for a document of which something is in no tier."""
        self._chain_of = chain_of
        self._compute = compute
        self._shares = shares
        self._clock = clock
        self._kept: dict[Document, _Kept] = {}
        self._turns: deque[tuple[Document, _Kept]] = deque()  # who is looked at next; not those that were dropped since

    def warm(self, core: EngineCore, document: Document) -> None:
        """Bring it to host memory, and let go of it there. NoRoomToPin."""
        self._keep(core, document).warming_until = self._clock() + WARM_S

    def pin(self, core: EngineCore, document: Document, ttl_s: float, must_have_room: bool = True) -> None:
        """Keep it in host memory for so long from now on. NoRoomToPin, unless it may wait for room."""
        self._keep(core, document, must_have_room).pinned_until = self._clock() + ttl_s

    def unpin(self, core: EngineCore, document: Document) -> None:
        """Keep it no longer; what was not pinned is left alone."""
        if document in self._kept:
            self._kept[document].pinned_until = None
            self._look_at(core, document, self._kept[document])

    def drop(self, core: EngineCore, document: Document) -> None:
        """Let go, whatever for it was held."""
        kept = self._kept.pop(document, None)
        if kept is not None and kept.pin is not None:
            self._shares.end(core, kept.pin)

    def end(self, core: EngineCore) -> None:
        """Let go of all."""
        for document in list(self._kept):
            self.drop(core, document)

    def is_held(self, document: Document) -> bool:
        """Whether all of it is held in host memory now."""
        kept = self._kept.get(document)
        return kept is not None and kept.pin is not None and kept.pin.is_whole

    def is_warming(self, document: Document) -> bool:
        """Whether it is on its way to host memory."""
        kept = self._kept.get(document)
        return kept is not None and kept.warming_until is not None

    def tick(self, core: EngineCore) -> None:
        """End what is over, and bring back what was lost: of some documents, with the next calls of the others."""
        for _ in range(min(MOST_LOOKED_AT, len(self._turns))):
            document, kept = self._turns.popleft()
            if self._kept.get(document) is not kept:
                continue
            self._turns.append((document, kept))
            if self._look_at(core, document, kept):
                return

    def _look_at(self, core: EngineCore, document: Document, kept: _Kept) -> bool:
        """Do what is due; whether it was something that takes its time."""
        now = self._clock()
        if kept.pinned_until is not None and now >= kept.pinned_until:
            kept.pinned_until = None
        has_come = kept.pin is not None and kept.pin.is_whole
        if kept.warming_until is not None and (has_come or now >= kept.warming_until):
            kept.warming_until = None
        if kept.pinned_until is None and kept.warming_until is None:
            self.drop(core, document)
            return True
        if now >= kept.renew_at:
            self._begin(core, document, kept)
            return True
        return False

    def _keep(self, core: EngineCore, document: Document, must_have_room: bool = True) -> _Kept:
        if core.config.host is None and must_have_room:
            raise NoRoomToPin("host tier: there is none; give host.capacity a size")
        kept = self._kept.get(document) or _Kept()
        self._begin(core, document, kept)
        if kept.pin is None and must_have_room:
            needed = document.num_tokens * core.bytes_per_token / 2**20
            share = self._shares.share_bytes(core) / 2**20
            raise NoRoomToPin(
                f"host tier: the document takes {needed:.1f} MiB, more than is left of the {share:.1f} MiB that may "
                "be kept for you; "
                "unpin another, or raise host.capacity"
            )
        if document not in self._kept:
            self._kept[document] = kept
            self._turns.append((document, kept))
        return kept

    def _begin(self, core: EngineCore, document: Document, kept: _Kept) -> None:
        """Pin it, as if for the first time."""
        if kept.pin is not None:  # ended first, so that it does not count twice; nobody takes a slot meanwhile
            self._shares.end(core, kept.pin)
        chain = self._chain_of(core, document)
        kept.pin = self._shares.pin(core, document.tenant, chain, document.num_tokens)
        kept.renew_at = self._clock() + RENEW_S
        hit = core.cache.lookup(chain, document.num_tokens + 1)
        if hit.num_tokens < hit.limit:
            self._compute(document)
