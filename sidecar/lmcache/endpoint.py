"""LmcacheEndpoint: LMCache's multiprocess protocol for the sidecar. Translates frames into calls of `LayoutTiers`."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from kvtier.sidecar.endpoint import AttachedClient, ConnectorCounts
from kvtier.sidecar.layout import Layout, LayoutRefused
from kvtier.sidecar.layouts import Layouts
from kvtier.sidecar.lmcache.attached import attached, copied, worker_name
from kvtier.sidecar.lmcache.digest_lane import MAX_IN_FLIGHT, DigestLane
from kvtier.sidecar.lmcache.explained_prompt import NOT_TOLD
from kvtier.sidecar.lmcache.hybrid_layout import groups_of
from kvtier.sidecar.lmcache.lookups import Lookups
from kvtier.sidecar.lmcache.promises import MAX_PROMISES, RETRIEVE_S, Counts, LoadState, Promise, Promises
from kvtier.sidecar.lmcache.registrations import Instance, Registrations
from kvtier.sidecar.lmcache.stores import StoreCounts, Stores
from kvtier.sidecar.lmcache.token_encoding import tokens_of
from kvtier.sidecar.lmcache.token_keys import TokenKeys
from kvtier.sidecar.lmcache.wire import (
    NEEDED_CLIENT,
    NEGOTIATE,
    OPERATIONS,
    Key,
    Loaded,
    Pool,
    Refused,
    Registration,
    Room,
    Slot,
    Stored,
    check_salt,
    decode_operation,
    encode,
    is_number,
)
from kvtier.sidecar.lmcache.zmtp import message_bytes
from kvtier.sidecar.port import Client, Message, Port
from kvtier.sidecar.quarantine import Lifeline
from kvtier.sidecar.refusals import Refusals
from kvtier.tiers.naming.named_blocks import NamedBlocks, tenant_of
from kvtier.transfer.transfer_engine import Route, TransferEngine

HELD_S = 0.05  # maximum delay of an answer about a lookup, because an engine's scheduler may block on it
VERIFYING_AHEAD = 1  # batches in flight while no load waits for them, so that they take one processor at most
MAX_HELD = 4096  # answers that wait for a promise at the same time


class EndedConnections:
    """Connections that the sidecar no longer serves, but whose workers may still copy. Owned by the endpoint's thread.

    A worker's end of its connection is closed when its process exits. It is also closed when the process closes its
    LMCache client, which first waits for copies in flight. So once the worker's end is closed, no copy is in flight.
    Until then, the sidecar keeps its own end open. Otherwise libzmq would close the worker's end at once, even in the
    middle of a copy.
    """

    def __init__(self) -> None:
        self._lifelines: dict[Client[list[bytes]], Lifeline] = {}

    def add(self, client: Client[list[bytes]], *, is_watched: bool) -> None:
        """Take over a connection that is no longer served, and close the sidecar's end of it.

        If *is_watched*, a worker may still be copying. The sidecar's end then stays open until the worker's is closed.
        """
        if is_watched:
            self._lifelines[client] = Lifeline(client.connection)
        else:
            client.connection.close()

    def is_cut(self, client: Client[list[bytes]]) -> bool:
        """Return whether the client's processes have closed their end of the connection."""
        if client.is_open:
            return False
        lifeline = self._lifelines.get(client)
        if lifeline is not None and not lifeline.is_cut:
            return False
        self._lifelines.pop(client, None)
        return True

    def close(self) -> None:
        """Close the sidecar's end of all connections, even if workers may still be copying."""
        for lifeline in self._lifelines.values():
            lifeline.close()
        self._lifelines.clear()


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A request that is being processed: its client, and the two frames that the answer has to repeat."""

    client: Client[list[bytes]]
    uid: bytes
    operation: bytes


@dataclass(frozen=True, slots=True)
class Held:
    """An answer, sent once *is_ready* returns True, or at time *until*. *answer* may return `_LATER` instead."""

    call: PendingCall
    until: float
    is_ready: Callable[[], bool]
    answer: Callable[[], object]
    load: "Load | None" = None  # the load that the answer starts


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's request to copy chunks out of the sidecar's host memory."""

    instance: Instance
    rank: int
    request_id: str
    chunks: range

    @property
    def groups(self) -> range:
        """The KV cache groups of the worker's rank."""
        return groups_of(self.instance.layout, self.rank)


class _Later:
    """The type of `_LATER`, the marker that an operation's method returns if its answer is sent later."""


_LATER = _Later()


@dataclass(frozen=True, slots=True)
class EndpointStatistics:
    """A snapshot of all counters of the endpoint."""

    operations: Mapping[str, int]
    refused: Mapping[str, int]
    num_clients: int
    num_promises: int
    num_held: int
    promised: Counts
    stored: StoreCounts


class LmcacheEndpoint:
    """The endpoint for engines that use LMCache's client. Owned by the sidecar's thread.

    An engine's scheduler asks how much of a prompt is cached (`lookup`, then `query_prefetch_status`). A reported hit
    is a promise that the engine's workers can load its chunks. It must be kept: under vLLM's default policy, the engine
    ends if it cannot load a chunk of a hit. See `Promises`.

    The workers map the segment, which is the sidecar's host memory. They copy promised chunks out of it (between
    `prepare_retrieve` and `commit_retrieve`), and computed chunks into it (between `prepare_store` and `commit_store`).

    A lookup is answered at once, unless chunks must first be fetched. A load is answered when its chunks are verified.
    Both waits have a time limit. The protocol has no error answers, so a refused request gets a harmless result. The
    sidecar's loop polls the transfers and tiers, and then calls `tick` and `receive`.
    """

    def __init__(
        self,
        port: Port[list[bytes]],
        layouts: Layouts,
        transfers: TransferEngine,
        chunk_tokens: int,
        refusals: Refusals,
        clock: Callable[[], float],
        weights: Callable[[str], str] = lambda model: "",
    ) -> None:
        """Start without engines. *weights* returns a digest or revision of a model's weights; empty if unknown."""
        self._port = port
        self._layouts = layouts
        self._chunk_tokens = chunk_tokens
        self._refusals = refusals
        self._clock = clock
        self._num_operations: Counter[str] = Counter()
        self._token_keys = TokenKeys(chunk_tokens)
        self._registrations = Registrations(layouts, chunk_tokens, weights)
        self._verifying = DigestLane(transfers, Route.HOST_TO_DEVICE)
        self._taking = DigestLane(transfers, Route.DEVICE_TO_HOST)
        self._stores = Stores(self._taking, layouts.shares, clock)
        self._lookups = Lookups(
            chunk_tokens,
            layouts.records,
            layouts.what_if,
            layouts.begin_explaining(chunk_tokens, NOT_TOLD),
            clock,
            layouts.tracer,
        )
        self._promises = Promises(self._verifying, self._stores, layouts.shares, clock, self._lookups.on_loaded)
        self._held: list[Held] = []
        self._ended = EndedConnections()
        self._does: Mapping[int | str, Callable[..., object]] = {
            8: self._lookup,
            9: self._query_prefetch_status,
            10: self._wait_prefetch_status,
            12: self._free_lookup_locks,
            13: self._end_session,
            14: self._register,
            15: self._unregister,
            16: self._prepare_store,
            17: self._commit_store,
            18: self._prepare_retrieve,
            19: self._commit_retrieve,
            20: self._clear,
            21: self._get_chunk_size,
            22: self._ping,
            NEGOTIATE: self._negotiate_chunk_size,
        }

    @property
    def file(self) -> int:
        """A file descriptor that is readable while there are frames to process."""
        return self._port.fileno()

    @property
    def is_waiting(self) -> bool:
        """True if any answer is delayed until it is known how many chunks of a hit can be loaded."""
        return bool(self._held)

    def receive(self) -> bool:
        """Process the frames that have arrived; return whether more frames wait for their turn."""
        for message in self._port.receive():
            self._serve(message)
        for client in self._port.take_disconnected():
            self._end_client(client)
        self._verify()
        return self._port.has_more

    def tick(self) -> None:
        """Continue lookups and digest computations, send ready answers, and end leases and connections on timeout."""
        self._port.tick(stays=self._is_copying)
        self._promises.tick()
        self._verify()
        self._taking.pump()
        self._answer_held()

    def close(self) -> None:
        """Stop receiving frames, and end every connection and lease.

        Workers may still be copying from or to their slots. So after this call, no other block may be put into any
        slot.
        """
        self._port.close()
        for client in self._port.take_disconnected():
            client.connection.close()
            self._end_leases(client)
        self._ended.close()

    def on_clear(self, layouts: Sequence[Layout]) -> None:
        """Ensure that no lookup ever finds chunks of these layouts that engines are storing now.

        Hits that were already reported to engines can still be loaded.
        """
        self._stores.void(layouts)
        self._token_keys.drop_ended()

    def clients(self) -> list[AttachedClient]:
        """Return a snapshot of the attached clients."""
        return list(attached(self._port.clients, self._registrations, self._promises, self._stores))

    def counts(self) -> ConnectorCounts:
        """Return a snapshot of the counters that every kind of endpoint has."""
        promised, stored = self._promises.counts, self._stores.counts
        return ConnectorCounts(
            "lmcache",
            num_asked=promised.num_asked,
            num_promised=promised.num_promised,
            num_loaded=promised.num_loaded,
            num_stored=stored.num_stored,
            tokens=self._lookups.tokens,
            lost={
                "corrupt": promised.num_corrupt,
                "late": promised.num_late,
                "over_share": promised.num_over_share + stored.num_over_share,
                "without_room": stored.num_without_room,
                "given_up": stored.num_given_up,
            },
            operations=dict(self._num_operations),
            refused=dict(self._refusals.counts),
        )

    def statistics(self) -> EndpointStatistics:
        """Return a snapshot of all counters."""
        return EndpointStatistics(
            dict(self._num_operations),
            dict(self._refusals.counts),
            self._port.num_clients,
            len(self._promises),
            len(self._held),
            replace(self._promises.counts),
            replace(self._stores.counts),
        )

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        self._token_keys.check()
        self._stores.check()
        self._promises.check()
        self._layouts.shares.check()

    def _verify(self) -> None:
        """Verify chunks of reported hits, on one processor at most unless a load waits for the result."""
        is_loading = any(held.load is not None for held in self._held)
        self._verifying.max_in_flight = MAX_IN_FLIGHT if is_loading else VERIFYING_AHEAD
        self._promises.verify()
        self._verifying.pump()

    def _serve(self, message: Message[list[bytes]]) -> None:
        frames = message.content
        if len(frames) < 2 or not is_number(frames[0]):
            self._refusals.refused("garbage", "a client sent a message that is not a request; it is ignored")
            return
        if not frames[1]:  # flow control of an event stream, which the sidecar does not have
            return
        call, number, payload = PendingCall(message.client, frames[0], frames[1]), None, frames[2:]
        try:
            number = decode_operation(call.operation, len(payload))
            operation = OPERATIONS[number]
            self._num_operations[operation.name] += 1
            does, values = self._does.get(number), operation.decode(payload)
            answer = operation.harmless if does is None else does(call, *values)
        except Refused as error:
            self._refusals.refused(error.kind, str(error))
            answer = self._harmless(number)
        if answer is not _LATER:
            self._answer(call, answer)

    def _harmless(self, number: int | str | None) -> object:
        """Return an answer that does no harm to a client whose request is refused.

        A worker whose registration is refused still gets the shared host memory to map. Without it, the worker would
        send the bytes of every chunk in its messages.
        """
        if number is None:
            return None
        return self._pool() if number == 14 else OPERATIONS[number].harmless

    def _answer(self, call: PendingCall, answer: object) -> None:
        self._port.send(call.client, message_bytes([call.uid, call.operation, encode(answer)]))

    def _answer_held(self) -> None:
        """Send the delayed answers that are due. If a client reads too slowly, its answers wait until it catches up."""
        now, waiting = self._clock(), self._held
        self._held = []
        for held in waiting:
            client = held.call.client
            if not client.is_open:
                continue
            if not client.is_reading or not (held.is_ready() or now >= held.until):
                self._held.append(held)
            elif (answer := held.answer()) is not _LATER:
                self._answer(held.call, answer)

    def _hold(
        self,
        call: PendingCall,
        until: float,
        is_ready: Callable[[], bool],
        answer: Callable[[], object],
        load: Load | None = None,
    ) -> object:
        """Return the answer if *is_ready* returns True.

        Otherwise, return `_LATER`, and send the answer later, at the latest at the time *until*.
        """
        if is_ready():
            return answer()
        if len(self._held) >= MAX_HELD:
            raise Refused("held", f"a request gets no chunks, because {MAX_HELD} other requests are already waiting")
        self._held.append(Held(call, until, is_ready, answer, load))
        return _LATER

    # The operations, in the order in which engines use them.

    def _get_chunk_size(self, call: PendingCall) -> object:
        return self._chunk_tokens

    def _negotiate_chunk_size(self, call: PendingCall, alignment: int) -> object:
        """Return the sidecar's chunk size. Log a refusal if it is not a multiple of *alignment*.

        In that case, the engine does not start. The answer does not depend on *alignment*, because the scheduler and
        all workers of an engine must get the same answer, even after a restart of the sidecar.
        """
        if self._chunk_tokens % alignment:
            self._refusals.refused(
                "chunk_size",
                f"an engine does not start: it needs chunks of a multiple of {alignment} tokens; restart the sidecar "
                f"with --chunk-tokens {-(-self._chunk_tokens // alignment) * alignment}, which empties the cache",
            )
        return self._chunk_tokens

    def _register(self, call: PendingCall, registration: Registration) -> object:
        """Attach the worker, and return the segment for it to map.

        A worker that has missed answers registers again, possibly in the middle of a copy. So if its layout is the
        same, it stays attached, and the slots of its copies stay leased.
        """
        known = self._registrations.find(call.client, registration.instance_id)
        try:
            layout = self._registrations.layout_of(registration)
            if known is None or known.layout != layout:
                self._detach(registration.instance_id)
                self._registrations.add(call.client, registration.instance_id, layout)
        except LayoutRefused as error:
            self._detach(registration.instance_id)
            raise Refused("layout", f"an engine of {registration.model_name!r} cannot be served: {error}") from None
        return self._pool()

    def _pool(self) -> Pool:
        segment = self._layouts.segment
        return Pool(f"/{segment.name.lstrip('/')}", segment.num_bytes)

    def _unregister(self, call: PendingCall, instance_id: int) -> object:
        """Detach the worker. It may still be copying: LMCache's client unregisters before it waits for its copies."""
        self._registrations.find(call.client, instance_id)
        self._detach(instance_id)
        return None

    def _ping(self, call: PendingCall, instance_id: int | None) -> object:
        return self._registrations.answer_ping(call.client, instance_id)

    def _lookup(self, call: PendingCall, key: Key, tp_size: int) -> object:
        """Start to find out how many chunks are cached; `query_prefetch_status` returns the result.

        The engine already has the chunks before *key*'s start. But if the sidecar lacks one of them, the reported hit
        ends before the first missing one, so that the engine stores the missing chunks again.
        """
        for earlier in self._promises.of_request(key.request_id):
            if earlier.client is call.client:
                earlier.end()
        if not key.num_kv_readers:
            raise Refused(
                "old_client",
                f"a client that does not send num_kv_readers gets no hits; install {NEEDED_CLIENT} in the engine's "
                "environment",
            )
        worker = self._registrations.worker_of(key.model_name, key.world_size)
        if worker is None or key.wants_no_load:
            return None
        if len(self._promises) >= MAX_PROMISES:
            raise Refused(
                "promises", f"a lookup gets no hit: the limit of {MAX_PROMISES} hits that are not loaded yet is reached"
            )
        chunks = range(key.start // self._chunk_tokens, key.end // self._chunk_tokens)
        every = self._blocks(key, range(chunks.stop))
        before, blocks = every.names[: chunks.start], every.since(chunks.start)
        if len(before) < chunks.start:
            raise Refused("range", f"a lookup starts at token {key.start}, but its prompt has fewer tokens")
        ranks = range(key.world_size)
        self._promises.begin(
            call.client,
            key.request_id,
            worker,
            blocks,
            ranks,
            key.num_kv_readers,
            chunks.start,
            on_settled=lambda promise: self._lookups.on_settled(
                promise, tokens_of(key).num, key.num_computed, self._token_keys.chain_of(key.request_id)
            ),
            before=before,
        )
        return None

    def _query_prefetch_status(self, call: PendingCall, request_id: str, max_s: float = HELD_S) -> object:
        """Return the length of the hit, in chunks from the beginning of the prompt; None if it is not known yet."""
        own = [promise for promise in self._promises.of_request(request_id) if promise.client is call.client]
        if not own:
            return 0
        promise = own[0]

        def answer() -> int | None:
            if not promise.is_settled:
                return None
            self._promises.want_verified(promise)
            return promise.hit_end

        return self._hold(call, self._clock() + max_s, lambda: promise.is_settled, answer)

    def _wait_prefetch_status(self, call: PendingCall, request_id: str, timeout_s: float) -> object:
        return self._query_prefetch_status(call, request_id, min(max(0.0, timeout_s), HELD_S))

    def _free_lookup_locks(self, call: PendingCall, key: Key, tp_size: int, abandoned: object = None) -> object:
        """Release chunks of a reported hit that the engine will not load, for example because it has them itself.

        *abandoned* lists the chunks of the request's earlier lookups. It is ignored, because each lookup releases the
        chunks of the previous one. The current hit may contain the same chunks, and must keep them.
        """
        chunks = range(key.start // self._chunk_tokens, key.end // self._chunk_tokens)
        self._promises.free(call.client, key.request_id, chunks)
        return None

    def _prepare_retrieve(self, call: PendingCall, key: Key, instance_id: int) -> object:
        """Return the slots of all requested chunks, for the worker to copy from.

        If these chunks are not leased for the request already, they are looked up and leased for this load only.
        """
        instance = self._registrations.find(call.client, instance_id)
        if instance is None:
            return Loaded()
        load = Load(instance, instance.rank_of(key), key.request_id, self._chunks(key))
        return self._load(call, load, self._all_blocks(key, load.chunks), self._clock() + RETRIEVE_S)

    def _load(self, call: PendingCall, load: Load, blocks: NamedBlocks, until: float) -> object:
        """Answer the worker that requests *load* once the chunks, which *blocks* names, are verified, or at *until*.

        If a chunk turns out to be damaged, the load begins again, because the disk may have a copy of the chunk.
        """
        promise = self._promise_of(load, blocks)
        if promise is None:
            max_s = until - self._clock()
            promise = self._promises.begin(
                call.client, load.request_id, load.instance, blocks, [load.rank], 1, load.chunks.start, max_s
            )
        self._promises.want_verified(promise)

        def is_ready() -> bool:
            return promise.load_state(load.groups, load.chunks) is not LoadState.PENDING

        def answer() -> object:
            state = promise.load_state(load.groups, load.chunks)
            if state is LoadState.VERIFIED and self._registrations.is_attached(load.instance):
                return self._begin_reading(promise, load)
            if promise.client is call.client:  # the promise was made for this load only
                promise.end()
            may_retry = state is LoadState.BROKEN and self._registrations.is_attached(load.instance)
            return self._load(call, load, blocks, until) if may_retry and self._clock() < until else Loaded()

        return self._hold(call, until, is_ready, answer, load)

    def _commit_retrieve(self, call: PendingCall, key: Key, instance_id: int) -> object:
        instance = self._registrations.find(call.client, instance_id)
        if instance is not None:
            load = Load(instance, instance.rank_of(key), key.request_id, self._chunks(key))
            if not self._refuse_held(load):
                self._promises.loaded(load.request_id, load.rank, instance, load.chunks)
        return True

    def _refuse_held(self, load: Load) -> bool:
        """Refuse the load if its answer is still delayed. Return whether the load was refused.

        Called when the worker has ended the load. The worker no longer waits for the answer, and will not use it.
        """
        for held in self._held:
            if held.load == load:
                self._held.remove(held)
                self._answer(held.call, Loaded())
                return True
        return False

    def _prepare_store(
        self, call: PendingCall, key: Key, instance_id: int, skipped: Sequence[Sequence[int]] = ()
    ) -> object:
        """Reserve slots for the worker's chunks that are neither in host memory nor on disk.

        The answer has no slots if there is no room.
        """
        instance = self._registrations.find(call.client, instance_id)
        if instance is None:
            return Stored()
        rank, chunks = instance.rank_of(key), self._chunks(key)
        left_out = _skipped(instance, rank, chunks, skipped)
        blocks = self._all_blocks(key, chunks)
        stores = self._stores.reserve(instance, rank, key.request_id, chunks, blocks, left_out)
        if not stores:
            return Stored()
        self._lookups.on_stored(instance.tiers, key.request_id, list(dict.fromkeys(chain(*(s.names for s in stores)))))
        first = groups_of(instance.layout, rank).start
        return Stored(
            Room(
                list(chain(*(_slots(instance, store.group_id, store.slots) for store in stores))),
                list(chain(*(store.places for store in stores))),
                list(chain(*([store.group_id - first] * len(store.places) for store in stores))),
            )
        )

    def _commit_store(self, call: PendingCall, key: Key, instance_id: int, data: bytes) -> object:
        if data:
            why = "a worker sends chunks by value, because it cannot map the sidecar's memory; share /dev/shm with it"
            raise Refused("pickle", why)
        instance = self._registrations.find(call.client, instance_id)
        if instance is None:
            return False
        return self._stores.commit(instance, instance.rank_of(key), key.request_id, self._chunks(key))

    def _end_session(self, call: PendingCall, request_id: str) -> object:
        self._promises.end_request(call.client, request_id)
        self._token_keys.forget(request_id)
        return None

    def _clear(self, call: PendingCall, force: bool = True) -> object:
        """Evict everything that is cached now."""
        self.on_clear([tiers.layout for tiers in self._layouts])
        self._layouts.clear()
        return None

    # Shared by the operations.

    def _chunks(self, key: Key) -> range:
        """Return the numbers of the chunks that a worker requests. Raise `Refused` unless they are whole chunks."""
        if key.start % self._chunk_tokens or key.end % self._chunk_tokens or key.start >= key.end:
            raise Refused(
                "range",
                f"a worker requests tokens {key.start} to {key.end}, which are not whole chunks of "
                f"{self._chunk_tokens} tokens",
            )
        return range(key.start // self._chunk_tokens, key.end // self._chunk_tokens)

    def _blocks(self, key: Key, chunks: range) -> NamedBlocks:
        """Return the names and parents of these chunks, except those for which the key has too few tokens."""
        check_salt(key.cache_salt)
        names = self._token_keys.names(key.request_id, key.cache_salt, tokens_of(key))
        own = names[chunks.start : chunks.stop]
        parents = [names[chunk - 1] if chunk else None for chunk in chunks[: len(own)]]
        return NamedBlocks(own, parents, tenant_of(key.cache_salt))

    def _all_blocks(self, key: Key, chunks: range) -> NamedBlocks:
        """Return the names and parents of these chunks. Raise `Refused` if the key has too few tokens for them."""
        blocks = self._blocks(key, chunks)
        if len(blocks.names) < len(chunks):
            raise Refused("range", f"a worker requests chunks up to token {key.end}, but sends fewer tokens")
        return blocks

    def _promise_of(self, load: Load, blocks: NamedBlocks) -> Promise | None:
        """Return the request's promise (a hit whose chunks are leased) from which the worker can load these chunks.

        Returns None if there is none. It may still be unknown how many of the promise's chunks can be loaded.
        """
        for promise in self._promises.of_request(load.request_id):
            if promise.tiers is load.instance.tiers and promise.has(load.groups, load.chunks, blocks.names[-1]):
                return promise
        return None

    def _begin_reading(self, promise: Promise, load: Load) -> Loaded:
        """Record that the worker begins to copy, and return the slots of the chunks, which are all verified."""
        instance, groups, here = load.instance, load.groups, promise.places(load.chunks)
        slots: list[Slot] = []
        group_ids: list[int] = []
        chunk_indices: list[int] = []
        for own in promise.of_groups(groups):
            slots += _slots(instance, own.group_id, own.begin_reading(instance, here, self._clock()))
            chunk_indices += [place - here.start for place in own.needed_of(here)]
            group_ids += [own.group_id - groups.start] * (len(slots) - len(group_ids))
        return Loaded(True, b"", {"slots": slots, "group_ids": group_ids, "chunk_indices": chunk_indices})

    def _is_copying(self, client: Client[list[bytes]]) -> bool:
        return self._stores.is_written_by(client) or self._promises.is_read_by(client)

    def _detach(self, instance_id: int) -> None:
        """Detach the worker. The slots of its copies stay leased until its process has closed the connection."""
        instance = self._registrations.remove(instance_id)
        if instance is None:
            return
        name, client = worker_name(instance), instance.client
        copies = copied(instance, self._promises, self._stores)

        def end() -> None:
            self._stores.end_instance(instance)
            self._promises.end_instance(instance)

        self._layouts.quarantine.hold(
            "lmcache",
            AttachedClient(name, client.since, instance.layout, copies),
            lambda: [] if self._ended.is_cut(client) else [name],
            end,
        )

    def _end_client(self, client: Client[list[bytes]]) -> None:
        """Handle the end of a client's connection, which either side may have ended."""
        self._ended.add(client, is_watched=self._is_copying(client))
        self._end_leases(client)

    def _end_leases(self, client: Client[list[bytes]]) -> None:
        for instance in self._registrations.of_client(client):
            self._detach(instance.instance_id)
        self._promises.end_client(client)


def _slots(instance: Instance, group_id: int, slots: Sequence[int]) -> list[Slot]:
    """Return the positions of these slots in host memory, as the `Slot` objects that workers are sent."""
    parts, memory = instance.layout.parts, instance.tiers.memories[group_id]
    part = parts[group_id % len(parts)]
    return [Slot(memory.offset(slot), part.num_bytes, part.shape, part.dtype) for slot in slots]


def _skipped(
    instance: Instance, rank: int, chunks: range, skipped: Sequence[Sequence[int]]
) -> Mapping[int, Sequence[int]]:
    """Return, by group, the chunks that a worker does not have and will not store.

    Raises `Refused` if *skipped* does not fit the worker's groups or the chunks of its request.
    """
    groups = groups_of(instance.layout, rank)
    if skipped and len(skipped) != len(groups):
        raise Refused("range", f"a worker lists skipped chunks of {len(skipped)} groups, but it has {len(groups)}")
    if any(place >= len(chunks) for own in skipped for place in own):
        raise Refused("range", f"a worker skips a chunk that is not one of the {len(chunks)} chunks of its request")
    return dict(zip(groups, skipped, strict=False))
