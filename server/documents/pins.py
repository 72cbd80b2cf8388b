"""DocumentPins: keeps documents in host memory while they are pinned, or while they are being loaded (warming)."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtier.engine.core import EngineCore
from kvtier.server.documents.document import Document
from kvtier.server.documents.pin_shares import PinShares
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.pins import Pin

RENEW_S = 30.0  # how often a pin is renewed, which reloads lost blocks
WARM_S = 600.0  # timeout for loading a document into host memory
MAX_LOOKED_AT = 64  # documents to check after one step; checking that many takes 50 us


class NoRoomToPin(Exception):
    """Error raised when host memory has no room to pin a document; the message says what to do."""


@dataclass(frozen=True, slots=True)
class _Ends:
    """The times at which a document's pin ends, and at which its warming times out. 0: not pinned, or not warming."""

    pinned: float = 0.0
    warming: float = 0.0

    @property
    def last(self) -> float:
        return max(self.pinned, self.warming)


@dataclass(eq=False, slots=True)
class _Kept:
    """The state of a document that is pinned or being loaded. *pin* is None while host memory has no room for it."""

    ends: _Ends = _Ends()
    pin: Pin | None = None
    renew_at: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.pin is not None and self.pin.is_whole


class DocumentPins:
    """The documents to keep in host memory, within each tenant's share of it. Owned by the engine's thread.

    Each pin is renewed every half minute, to reload blocks that host memory has lost. When a pin's time is over,
    `TimedPins` releases it, and `tick` forgets the document.
    """

    def __init__(
        self,
        core: EngineCore,
        chain_of: Callable[[Document], BlockChain],
        compute: Callable[[Document], None],
        shares: PinShares,
    ) -> None:
        """Create an instance without pins.

        *chain_of* returns the hashes of a document's blocks. *compute* queues the computation of a document that is not
        fully cached.
        """
        self._core = core
        self._chain_of = chain_of
        self._compute = compute
        self._shares = shares
        self._kept: dict[Document, _Kept] = {}
        # The order in which documents are checked; entries of dropped documents are skipped.
        self._turns: deque[tuple[Document, _Kept]] = deque()

    def warm(self, document: Document) -> None:
        """Start to load a document into host memory, and keep it there until all of it is loaded.

        Raises NoRoomToPin if the document does not fit.
        """
        self._keep(document, replace(self._ends(document), warming=self._core.pins.now() + WARM_S))

    def pin(self, document: Document, ttl_s: float, must_have_room: bool = True) -> None:
        """Keep a document in host memory for *ttl_s* seconds from now.

        If the tenant's share has no room, NoRoomToPin is raised, and an earlier pin stays unchanged. But if
        *must_have_room* is false, the document is pinned later, once there is room.
        """
        self._keep(document, replace(self._ends(document), pinned=self._core.pins.now() + ttl_s), must_have_room)

    def unpin(self, document: Document, in_s: float = 0.0) -> None:
        """End the document's pin in *in_s* seconds. A load that `warm` has started continues.

        Does nothing if the document is neither pinned nor being loaded.
        """
        if document in self._kept:
            kept = self._kept[document]
            kept.ends = replace(kept.ends, pinned=self._core.pins.now() + in_s)
            self._look_at(document, kept)

    def drop(self, document: Document) -> None:
        """Stop keeping a document in host memory at once, whether it is pinned or being loaded (see `warm`)."""
        kept = self._kept.pop(document, None)
        if kept is not None and kept.pin is not None:
            self._core.pins.unpin(kept.pin)

    def end(self) -> None:
        """Release all documents."""
        for document in list(self._kept):
            self.drop(document)

    def is_held(self, document: Document) -> bool:
        """Return whether all blocks of the document are held in host memory now."""
        return document in self._kept and self._kept[document].is_whole

    def is_warming(self, document: Document) -> bool:
        """Return whether the document is being loaded into host memory."""
        return self._ends(document).warming > 0

    def tick(self) -> None:
        """Check the next few documents. Renew a pin or forget a document at most once, because both are slow."""
        for _ in range(min(MAX_LOOKED_AT, len(self._turns))):
            document, kept = self._turns.popleft()
            if self._kept.get(document) is not kept:
                continue
            self._turns.append((document, kept))
            if self._look_at(document, kept):
                return

    def _look_at(self, document: Document, kept: _Kept) -> bool:
        """Forget the document if its pin and its warming have ended, or renew its pin if that is due.

        Return whether the document was forgotten or its pin renewed.
        """
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
        if not self._core.cache.pins.max_bytes and must_have_room:
            why = (
                "not configured; set host.capacity"
                if sidecar is None
                else f"the sidecar {sidecar} does not answer; start it"
            )
            raise NoRoomToPin(f"host tier: {why}")
        kept = self._kept.get(document) or _Kept()
        if not self._renew(document, kept, ends, must_have_room):
            needed = self._core.pinned_bytes(document.num_tokens) / 2**20
            share = self._shares.share_bytes / 2**20
            raise NoRoomToPin(
                f"host tier: the document takes {needed:.1f} MiB, more than is free of your share of {share:.1f} MiB; "
                "unpin another document, or raise "
                f"{'host.capacity' if sidecar is None else 'the host memory of the sidecar'}"
            )
        if document not in self._kept:
            self._kept[document] = kept
            self._turns.append((document, kept))

    def _renew(self, document: Document, kept: _Kept, ends: _Ends, must_have_room: bool) -> bool:
        """Replace the document's pin by one that lasts until `ends.last`, and queue the computation of missing blocks.

        If the tenant's share has no room, and *must_have_room* is true, change nothing and return False. If it is
        false, the document stays without a pin until the next renewal. In all other cases, the result is True.
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
