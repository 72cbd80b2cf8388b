"""DocumentWorker: computes and pins documents in the engine's thread, and reports which tiers hold them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtier.engine.core import EngineCore
from kvtier.engine.llm import keyed
from kvtier.server.documents.document import Document
from kvtier.server.documents.kept_prefixes import PinnedPrefixes
from kvtier.server.documents.pin_shares import PinShares
from kvtier.server.documents.pins import DocumentPins
from kvtier.server.documents.prefills import DocumentPrefills
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS, BlockChain, ExtraKeys, MultimodalItem
from kvtier.tiers.naming.tier import Tier

PROMPT_PIN_S = 3600.0  # for a request that pins its prompt without a ttl_s


class Status(StrEnum):
    """The progress of a document's computation."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    READY = "ready"  # all of it is cached, in any tier
    EVICTED = "evicted"  # was ready; part of it is no longer in any tier
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class DocumentState:
    """A snapshot of a document's status and of its tokens by tier. A token counts only in its fastest tier."""

    status: Status
    error: str | None
    num_computed: int  # tokens so far while the document is prefilling; all tokens if it is ready; else 0
    tokens: Mapping[str, int]  # by tier, and "nowhere"
    num_bytes: Mapping[str, int]  # by tier
    load_s: float | None  # estimated time to load the document to the device now; None: unknown yet
    compute_s: float | None  # estimated time to compute all of the document; None: unknown yet
    is_warming: bool  # being loaded into host memory
    is_held: bool  # all of it is in host memory, and stays there while it is pinned


class DocumentWorker:
    """The part of `Documents` that runs in the engine's thread: it computes documents, and pins documents and prompts.

    It has the queue of documents to compute, and all pins. `AsyncEngine.add_attendant` creates it in the engine's
    thread, which then calls `tick` after every step, and finally `end`.
    """

    def __init__(self, core: EngineCore, salt_of: Callable[[Document], str | None], num_tenants: int) -> None:
        """Create a worker. *salt_of* returns the cache_salt with which a document's blocks are hashed."""
        self._core = core
        self._salt_of = salt_of
        self._chains: dict[Document, BlockChain] = {}
        self._errors: dict[Document, str] = {}
        self._on_ready: dict[Document, Callable[[], None]] = {}  # callbacks of documents that were never computed
        self._shares = PinShares(core, num_tenants)
        self._prefills = DocumentPrefills(core, self.extra_of, self._on_ended)
        self._pins = DocumentPins(core, self._chain, self._compute, self._shares)
        self.prefixes = PinnedPrefixes(core, self._shares)

    def extra_of(self, document: Document) -> ExtraKeys:
        """Return the adapter and cache_salt with which a document's blocks are hashed.

        Raises ValueError for an unknown adapter.
        """
        return keyed(self._core, NO_EXTRA_KEYS, document.lora, self._salt_of(document))

    def add(self, document: Document, on_ready: Callable[[], None]) -> None:
        """Queue a document unless it was computed before, and call *on_ready* once it is computed."""
        if not document.was_ready:
            self._on_ready[document] = on_ready
            self._compute(document)

    def warm(self, document: Document, tier: Tier) -> None:
        """Start to load a document into *tier*, and to compute blocks that no tier holds.

        Raises NoRoomToPin if it does not fit in host memory.
        """
        if tier is Tier.DEVICE:
            self._compute(document)
        else:
            self._pins.warm(document)

    def pin(self, document: Document, ttl_s: float, must_have_room: bool = True) -> None:
        """Keep a document in host memory for *ttl_s* seconds from now, see `DocumentPins.pin`."""
        self._pins.pin(document, ttl_s, must_have_room)

    def unpin(self, document: Document, in_s: float = 0.0) -> None:
        """End the document's pin in *in_s* seconds."""
        self._pins.unpin(document, in_s)

    def pin_prompt(
        self,
        tenant: str | None,
        token_ids: Sequence[int],
        lora: str | None,
        cache_salt: str | None,
        ttl_s: float,
        items: tuple[MultimodalItem, ...] = (),
    ) -> bool:
        """Pin the cached part of a prompt in host memory for *ttl_s* seconds. *items* are its images.

        Returns:
            Whether the prompt is pinned: False if the tenant's share has no room, or if no block can be pinned.
        """
        chain = self._core.chain(token_ids, keyed(self._core, ExtraKeys(multimodal=items), lora, cache_salt))
        pin = self._shares.pin(tenant, chain, len(token_ids), until=self._core.pins.now() + ttl_s)
        if pin is None or pin.num_bytes:
            return pin is not None
        self._core.pins.unpin(pin)
        return False

    def share_among(self, num_tenants: int) -> None:
        """Divide the memory for pins among *num_tenants* tenants from now on."""
        self._shares.num_tenants = num_tenants

    def drop(self, document: Document) -> None:
        """Forget a document, and end its computation and its pin. Its blocks stay cached until they are evicted."""
        self._prefills.remove(document)
        self._pins.drop(document)
        self._chains.pop(document, None)
        self._errors.pop(document, None)
        self._on_ready.pop(document, None)

    def end(self) -> None:
        """End the computation and the pins of all documents."""
        self._prefills.end()
        self._pins.end()

    def tick(self) -> None:
        """Advance the queue of documents, and renew pins. Called after every engine step."""
        self._prefills.tick()
        self._pins.tick()

    def residence(self, document: Document) -> DocumentState:
        """Return the document's status, and the number of its tokens in each tier."""
        core, chain = self._core, self._chain(document)
        hit = core.cache.lookup(chain, document.num_tokens + 1)
        tokens = dict.fromkeys([*map(str, Tier), "nowhere"], 0)
        for tier in core.cache.lookups.where(chain):
            tokens["nowhere" if tier is None else str(tier)] += chain.block_size
        tokens["nowhere"] += document.num_tokens % chain.block_size
        status = self._status(document, is_whole=hit.num_tokens == hit.limit)
        num_done = {Status.READY: document.num_tokens, Status.PREFILLING: self._prefills.num_computed}
        planner = core.planner
        compute_s = planner.compute_seconds(0, document.num_tokens) if planner.prefill.is_known else None
        return DocumentState(
            status,
            self._errors.get(document),
            num_done.get(status, 0),
            tokens,
            {str(tier): num_bytes for tier, num_bytes in core.cache.lookups.bytes_in(chain).items()},
            core.cache.plans.load_seconds(hit, planner),
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

    def _on_ended(self, document: Document, error: str | None) -> None:
        if error is not None:
            self._errors[document] = error
        elif document in self._on_ready:
            self._on_ready.pop(document)()

    def _chain(self, document: Document) -> BlockChain:
        if document not in self._chains:
            self._chains[document] = self._core.chain(document.token_ids.tolist(), self.extra_of(document))
        return self._chains[document]
