"""DocumentPins: keeps documents in host memory: pinned ones until their pin ends, warming ones until they have come."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtier.engine.core import EngineCore
from kvtier.server.documents.document import Document
from kvtier.server.documents.pin_shares import PinShares
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.pins import Pin

RENEW_S = 30.0  # how often a pin is made anew, which brings lost blocks back
WARM_S = 600.0  # how long a document may take to come to host memory
MAX_LOOKED_AT = 64  # documents after one step: 50 us


class NoRoomToPin(Exception):
    """Host memory has no room to pin the document; the message says what to do."""


@dataclass(frozen=True, slots=True)
class _Ends:
    """Until when a document is kept because it is pinned, and because it is warming; 0: it is not."""

    pinned: float = 0.0
    warming: float = 0.0

    @property
    def last(self) -> float:
        return max(self.pinned, self.warming)


@dataclass(eq=False, slots=True)
class _Kept:
    """A document that is kept: until when, and its pin, which is None while there is no room for one."""

    ends: _Ends = _Ends()
    pin: Pin | None = None
    renew_at: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.pin is not None and self.pin.is_whole


class DocumentPins:
    """Pins documents within each tenant's share, and forgets those whose time is over. Owned by the engine's thread.

    A pin ends by itself (`TimedPins`). It is made anew every half minute, so that a block that was lost comes back.
    """

    def __init__(
        self,
        core: EngineCore,
        chain_of: Callable[[Document], BlockChain],
        compute: Callable[[Document], None],
        shares: PinShares,
    ) -> None:
        """*chain_of* names a document's blocks. *compute* is called for a document with blocks that are in no tier."""
        self._core = core
        self._chain_of = chain_of
        self._compute = compute
        self._shares = shares
        self._kept: dict[Document, _Kept] = {}
        # The order in which documents are looked at; entries that were dropped since are skipped.
        self._turns: deque[tuple[Document, _Kept]] = deque()

    def warm(self, document: Document) -> None:
        """Bring a document to host memory, and let go of it once it is there. NoRoomToPin."""
        self._keep(document, replace(self._ends(document), warming=self._core.pins.now() + WARM_S))

    def pin(self, document: Document, ttl_s: float, must_have_room: bool = True) -> None:
        """Keep it in host memory for so long from now on. NoRoomToPin, unless it may wait for room; an earlier pin
        then stays as it was."""
        self._keep(document, replace(self._ends(document), pinned=self._core.pins.now() + ttl_s), must_have_room)

    def unpin(self, document: Document, in_s: float = 0.0) -> None:
        """End its pin so many seconds from now; a document that is not kept is left alone."""
        if document in self._kept:
            kept = self._kept[document]
            kept.ends = replace(kept.ends, pinned=self._core.pins.now() + in_s)
            self._look_at(document, kept)

    def drop(self, document: Document) -> None:
        """Let go of a document, pinned or warming."""
        kept = self._kept.pop(document, None)
        if kept is not None and kept.pin is not None:
            self._core.pins.unpin(kept.pin)

    def end(self) -> None:
        """Let go of all documents."""
        for document in list(self._kept):
            self.drop(document)

    def is_held(self, document: Document) -> bool:
        """Whether all blocks of the document are held in host memory now."""
        return document in self._kept and self._kept[document].is_whole

    def is_warming(self, document: Document) -> bool:
        """Whether the document is on its way to host memory."""
        return self._ends(document).warming > 0

    def tick(self) -> None:
        """Look at the next documents in turn: forget one whose time is over, or bring lost blocks of one back."""
        for _ in range(min(MAX_LOOKED_AT, len(self._turns))):
            document, kept = self._turns.popleft()
            if self._kept.get(document) is not kept:
                continue
            self._turns.append((document, kept))
            if self._look_at(document, kept):
                return

    def _look_at(self, document: Document, kept: _Kept) -> bool:
        """Forget a document whose time is over, or pin it anew if that is due; True if it did either, which is slow."""
        now = self._core.pins.now()
        if kept.is_whole or now >= kept.ends.warming:
            kept.ends = replace(kept.ends, warming=0.0)
        if now >= kept.ends.last:
            self.drop(document)
            return True
        if now >= kept.renew_at:
            self._renew(document, kept, kept.ends, must_have_room=False)
            return True
        return False

    def _ends(self, document: Document) -> _Ends:
        return self._kept[document].ends if document in self._kept else _Ends()

    def _keep(self, document: Document, ends: _Ends, must_have_room: bool = True) -> None:
        sidecar = self._core.config.sidecar
        if not self._core.cache.pinnable_bytes and must_have_room:
            why = "there is none; give host.capacity a size" if sidecar is None else f"{sidecar} is not there; start it"
            raise NoRoomToPin(f"host tier: {why}")
        kept = self._kept.get(document) or _Kept()
        if not self._renew(document, kept, ends, must_have_room):
            needed = document.num_tokens * self._core.bytes_per_token / 2**20
            share = self._shares.share_bytes / 2**20
            raise NoRoomToPin(
                f"host tier: the document takes {needed:.1f} MiB, more than is left of the {share:.1f} MiB that may "
                "be kept for you; "
                f"unpin another, or raise {'host.capacity' if sidecar is None else 'the host memory of the sidecar'}"
            )
        if document not in self._kept:
            self._kept[document] = kept
            self._turns.append((document, kept))

    def _renew(self, document: Document, kept: _Kept, ends: _Ends, must_have_room: bool) -> bool:
        """Pin the document anew until *ends*, as if for the first time, and compute what of it is in no tier.

        If its tenant's share has no room and *must_have_room*, it changes nothing and returns False. Otherwise the
        earlier pin ends, and the next renewal tries again.
        """
        pins, chain = self._core.pins, self._chain_of(document)
        pin = self._shares.pin(document.tenant, chain, document.num_tokens, until=ends.last, instead_of=kept.pin)
        if pin is None and must_have_room:
            return False
        if pin is None and kept.pin is not None:
            pins.unpin(kept.pin)
        kept.ends, kept.pin, kept.renew_at = ends, pin, pins.now() + RENEW_S
        hit = self._core.cache.lookup(chain, document.num_tokens + 1)
        if hit.num_tokens < hit.limit:
            self._compute(document)
        return True
