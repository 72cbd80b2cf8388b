"""`SchedulerSide`: the connector's decisions in vLLM's scheduler about which blocks to load and store, and when."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.connectors.vllm_connector.adapters import Adapters
from kvtier.connectors.vllm_connector.counts import Counts, Unstored
from kvtier.connectors.vllm_connector.digests import Digests
from kvtier.connectors.vllm_connector.load import Load, Where
from kvtier.connectors.vllm_connector.names import NO_ADAPTER, RequestNames
from kvtier.connectors.vllm_connector.step_work import AwaitedLoad, PageCopies, Segment, StepWork, WorkerReport
from kvtier.connectors.vllm_connector.stores import Offer, Stores
from kvtier.connectors.vllm_connector.taint import Placement, Taint
from kvtier.connectors.vllm_connector.vllm_request import NULL_PAGE, Pages, StatePage, VllmRequest
from kvtier.connectors.weights_lineage import WeightsLineage
from kvtier.engine.attached.sidecar_tiers import SidecarTiers
from kvtier.tiers.lower.lower_tiers import AllOf, Inquiry
from kvtier.tiers.naming.groups import AttentionGroup, alignment, longest_hit, longest_single
from kvtier.tiers.naming.named_blocks import tenant_of
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.block_memory import HostMemory

MAX_LOADS = 32  # in flight; further requests wait, and their deadline starts when they may load
OFFER_PAUSE_S = 0.02  # min time between two attempts to store blocks for which there were too few slots


@dataclass(slots=True)
class TrackedRequest:
    """The connector's state for one vLLM request, from the request's first lookup until it ends."""

    request: VllmRequest
    asked_at: float | None = None  # time of the first lookup since the last allocation of pages
    names: RequestNames | None = None  # None while the digest of the request's adapter is unknown
    offer: Offer | None = None
    placement: Placement | None = None  # since the last allocation
    load: Load | None = None
    num_local: int = 0  # tokens in vLLM's own cache at the last lookup
    inquiry: Inquiry | None = None  # query to the remote tier, since the last allocation
    is_settled: bool = False  # the length of the hit has been reported to vLLM
    junction: int = 0  # tokens after which only recurrent states are missing, if that is longer than the hit
    offered_at: float = float("-inf")
    is_over: bool = False  # the request has ended, and its blocks are offered for the last time
    why_unstored: Unstored = Unstored.LATE  # why blocks of the request got no slot when they were last offered


@dataclass(frozen=True, slots=True)
class _Computed:
    """A request whose first *num_tokens* tokens are computed once the current step has ended.

    The next step stores their blocks. *placement* has the request's pages in the current step. *states* has the pages
    that then hold recurrent states.
    """

    tracked: TrackedRequest
    offer: Offer
    placement: Placement
    num_tokens: int
    states: Sequence[StatePage]


@dataclass(slots=True)
class _Next:
    """The loads that are planned for the next step."""

    loads: list[PageCopies] = field(default_factory=list)
    loaded: list[Load] = field(default_factory=list)  # the loads from whose slots `loads` copies
    unloadable_pages: list[int] = field(default_factory=list)
    awaited: list[AwaitedLoad] = field(default_factory=list)


class SchedulerSide:
    """The connector's decisions in vLLM's scheduler about which blocks to load and store.

    vLLM looks up each waiting request once per step until the connector reports the length of the hit. The matching
    blocks are leased and verified while vLLM runs other requests, and the hit is reported afterwards. So the blocks of
    a reported hit are in mapped memory and correct, and their load should not fail. If a load fails nevertheless,
    blocks that vLLM computes from the affected pages are not stored.

    The blocks that a step computes are stored in the next step, after the step's tokens have been sent to users. If
    vLLM gives a request's pages to other requests in between, the pages still hold the request's bytes. The workers
    copy the pages before anything is written to them. If the request also runs in the next step, it keeps its pages, so
    workers may copy them after that step's forward pass. Otherwise workers copy the pages before the forward pass.

    If the model has several groups, requests wait until their load has ended, and run in a later step (`loads_ahead`).
    vLLM can only handle a failed load of such a model if the request has not run yet. And a recurrent state must be
    there when vLLM prepares the request's first step, because it then copies the state to the page that the step
    changes.

    Any thread that calls a method must hold the connector's lock.
    """

    def __init__(
        self,
        tiers: SidecarTiers,
        segment: Callable[[bytes], Segment],
        groups: Sequence[AttentionGroup],
        memories: Sequence[HostMemory],
        digests: Digests,
        adapters: Adapters,
        *,
        hash_tokens: int,
        num_workers: int,
        max_stored: Sequence[int],
        deadline_s: float,
        depend_on_next: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the scheduler side without requests.

        *segment* returns the segment that workers must map, given the boot id of a sidecar process. *hash_tokens* is
        the number of tokens per vLLM block hash. *max_stored* is the maximum number of blocks stored per step, by
        group. *deadline_s* is the maximum time that a request waits for its prefix. *depend_on_next* has the groups
        with a drafter's layers, see `GroupLayout`.
        """
        self.counts = Counts()
        self._tiers = tiers
        self._segment = segment
        self._groups = groups
        self._unit = alignment(groups)
        self.loads_ahead = len(groups) > 1 or not all(group.resumes_inside for group in groups)
        self._adapters = adapters
        self._hash_tokens = hash_tokens
        self._num_workers = num_workers
        self._max_stored = max_stored
        self._deadline_s = deadline_s
        self._depend_on_next = depend_on_next
        self._clock = clock
        self._where = Where(tiers, groups, memories, digests, self._on_corrupt)
        self._stores = Stores(tiers, groups, memories, digests, num_workers, self._on_stored, self._on_failed)
        self._mapped: bytes | None = None  # boot id of the segment that all workers have reported as mapped
        self._waited_for: bytes | None = None  # boot id of a segment that the workers did not map within a deadline
        self._requests: dict[str, TrackedRequest] = {}
        self._computed: list[_Computed] = []  # by the last step
        self._lineage = WeightsLineage()
        self._next = _Next()
        self._loading: dict[int, list[Load]] = {}  # by number of the step that copies the blocks
        self._taint = Taint(groups)
        self._past: list[Placement] = []  # of requests that ended or were preempted while steps were unreported
        self._unreported: set[int] = set()  # numbers of the steps on which the workers have not reported
        self._num_steps = 0

    @property
    def is_mapped(self) -> bool:
        """True if all workers map the memory of the current sidecar process."""
        return self._mapped is not None and self._mapped == self._tiers.boot

    @property
    def is_waiting(self) -> bool:
        """True if vLLM still waits for the length of any request's hit."""
        return any(each.asked_at is not None and not each.is_settled for each in self._requests.values())

    @property
    def is_digesting(self) -> bool:
        """True if digests of copied blocks are being computed."""
        return self._stores.is_digesting

    def num_matched(self, request: VllmRequest, num_computed: int) -> int | None:
        """Return how many tokens after the first *num_computed* will be loaded, or None while this is unknown.

        If more of the prompt is cached than the hit, and only a recurrent state is missing, tell vLLM to keep the state
        there. So the next prompt with the same beginning finds the state.
        """
        tracked = self._tracked(request)
        num_matched = self._num_matched(tracked, num_computed)
        if num_matched is not None and tracked.junction > num_computed + num_matched:
            request.shared_prefix_boundary = max(request.shared_prefix_boundary, tracked.junction)
        return num_matched

    def _num_matched(self, tracked: TrackedRequest, num_computed: int) -> int | None:
        tracked.num_local = num_computed
        if tracked.asked_at is None:
            tracked.asked_at = self._clock()
        if tracked.load is not None and num_computed < tracked.load.start:
            self._drop(tracked)  # vLLM has evicted blocks of the request since its last lookup
        if tracked.load is None:
            return self._begin(tracked, num_computed)
        if not tracked.is_settled:
            if not tracked.load.is_done and not self._is_late(tracked):
                return None
            self.counts.late_loads += not tracked.load.is_done
        tracked.is_settled = True
        num_matched = tracked.load.num_tokens - num_computed
        if num_matched <= 0:
            self._drop(tracked)
        return max(0, num_matched)

    def on_allocated(self, request: VllmRequest, pages: Pages, num_loaded: int) -> None:
        """Record the pages that vLLM has allocated, and plan the load of *num_loaded* tokens into them."""
        tracked = self._tracked(request)
        end = tracked.num_local + num_loaded
        self._end_placement(tracked)
        tracked.placement = self._taint.place(pages, tracked.num_local)
        if num_loaded:
            self._plan(tracked, pages, tracked.num_local, end)
        self._drop(tracked)
        tracked.asked_at, tracked.inquiry, tracked.is_settled, tracked.junction = None, None, False, 0
        self._refresh(tracked, end)

    def on_plan_failed(self, request_id: str, pages: Pages) -> None:
        """Record that none of *pages* could be loaded, because `on_allocated` failed. The next step tells vLLM."""
        unloadable_pages = [page for ids in pages for page in ids if page != NULL_PAGE]
        self._next.unloadable_pages += unloadable_pages
        if self.loads_ahead:
            self._next.awaited = [each for each in self._next.awaited if each.request_id != request_id]
            self._next.awaited.append(AwaitedLoad(request_id, frozenset(unloadable_pages)))

    def tokens_by_tier(self, request: VllmRequest, num_loaded: int) -> dict[Tier, int]:
        """Return the number of tokens just loaded for the request, by the tier that held them."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not self._next.loaded:
            return {Tier.HOST: num_loaded}
        return self._next.loaded[-1].tokens_by_tier(tracked.num_local, tracked.num_local + num_loaded)

    def step(
        self,
        num_scheduled: Mapping[str, int],
        pages_of: Callable[[str], Pages | None],
        is_storing: bool = True,
        overwritten: Collection[int] = (),
        states: Mapping[str, Sequence[StatePage]] | None = None,
    ) -> StepWork:
        """Return the copies that workers must make in a step.

        Args:
            num_scheduled: Number of tokens that vLLM computes in the step, by request id.
            pages_of: Returns the current pages of a request, given its id.
            is_storing: Whether blocks may be stored in the step.
            overwritten: The pages that vLLM may change before the workers can copy them.
            states: The pages that hold recurrent states once the step has ended, by request id.
        """
        self._num_steps += 1
        number = self._num_steps
        running = [self._requests[name].placement for name in num_scheduled if name in self._requests]
        staying = {placement for placement in running if placement is not None}
        ends_late_stores = self._stores.must_end(staying, overwritten)
        stores = self._store_computed(number, is_storing, overwritten, staying)
        if self._next.unloadable_pages:
            self.on_unloaded(self._next.unloadable_pages)
        if not self._taint.is_empty or self._next.loaded or self._loading:
            self._follow(num_scheduled, pages_of)
        for request_id, num_tokens in num_scheduled.items():
            self._note_computed(request_id, num_tokens, pages_of, (states or {}).get(request_id, ()))
        boot = self._tiers.boot
        wanted = self._segment(boot) if boot is not None and boot != self._mapped else None
        gathered, self._next = self._next, _Next()  # last, so that `salvaged` has the loads if an earlier line fails
        if gathered.loaded:
            self._loading[number] = gathered.loaded
        work = StepWork(
            number, wanted, gathered.loads, stores, gathered.unloadable_pages, ends_late_stores, gathered.awaited
        )
        if work.is_reported:
            self._unreported.add(number)
        return work

    def salvaged(self) -> StepWork:
        """Return work for workers after `step` has failed: copy nothing, and report all planned loads as failed."""
        gathered, self._next = self._next, _Next()
        for load in gathered.loaded:
            load.release()
        self._computed.clear()
        self._stores.on_step_done(self._num_steps, has_stored=False)
        pages = [page for copies in gathered.loads for page in copies.pages]
        unloadable_pages = [*gathered.unloadable_pages, *pages]
        self.on_unloaded(unloadable_pages)
        return StepWork(self._num_steps, unloadable_pages=unloadable_pages, awaited=gathered.awaited)

    def poll(self) -> None:
        """Process the messages of the sidecar."""
        self._tiers.poll()
        for tracked in self._requests.values():
            if tracked.load is not None and not tracked.is_settled:
                tracked.load.poll()

    def on_report(self, report: WorkerReport) -> None:
        """Process a report of the workers. It may report stores of earlier steps."""
        if report.boot is not None and report.num_workers == self._num_workers:
            self._mapped = report.boot
        for load in self._loading.pop(report.number, ()):
            load.release()
        if report.unloaded:
            self.on_unloaded(report.unloaded)
        for number in report.stored:
            self._stores.on_copied(number, has_stored=True)
        for number in report.unstored:
            self._stores.on_copied(number, has_stored=False)
        self._unreported = {number for number in self._unreported if number > report.number}
        if not self._unreported:
            self._past.clear()

    def on_unloaded(self, pages: Collection[int]) -> None:
        """Taint *pages*, whose load failed, so that no block that depends on them is stored, see `Taint`."""
        placements = [each.placement for each in self._requests.values() if each.placement is not None]
        for placement in self._taint.spread(pages, [*self._past, *placements]):
            self._stores.discard(placement)

    def on_finished(self, request: VllmRequest) -> None:
        """Stop tracking a request that has ended or was aborted.

        The blocks of the request's last step are stored in the next step. If a block gets no slot in that step, it is
        never stored, because vLLM has taken its page back.
        """
        tracked = self._requests.pop(request.request_id, None)
        if tracked is not None:
            self._drop(tracked)
            tracked.is_over = True
            if tracked.placement is not None:
                if tracked.offer is not None and not any(each.tracked is tracked for each in self._computed):
                    num_tokens = tracked.placement.limit(min(request.num_computed_tokens, request.num_tokens))
                    self._count_unstored(tracked, tracked.offer, num_tokens)
                self._end_placement(tracked)

    def start_new_lineage(self) -> None:
        """Name all blocks differently from now on, so that no block from before a possible weight update is found.

        vLLM resets its connector after a weight update, and gives no other notice, see `WeightsLineage`. Blocks that
        are being stored are discarded.
        """
        self._lineage.start_new_lineage()
        self._computed.clear()
        self._stores.discard_all()
        for tracked in self._requests.values():
            self._drop(tracked)
            tracked.names = tracked.offer = tracked.inquiry = None

    def clear(self) -> bool:
        """Evict every block of this namespace from the sidecar's host memory and disk, for all engines that share it.

        Waits for the sidecar's answer. The remote tier keeps its blocks, because other machines share it.

        Returns:
            False if blocks are leased, or if the sidecar does not answer in time. True without a sidecar.
        """
        self._tiers.poll()
        return not self._tiers.is_attached or self._tiers.clear()

    def give_up(self) -> None:
        """Cancel all loads for which vLLM has not allocated pages yet, and count an internal error."""
        for tracked in self._requests.values():
            self._drop(tracked)
        self.counts.errors += 1

    def check(self) -> None:
        """Raise AssertionError if internal records contradict each other."""
        self._tiers.status.check()
        assert all(number <= self._num_steps for number in self._loading), "a step that does not exist copies blocks"
        assert self._unreported or not self._past, "placements are kept although no step can taint them any more"

    def _tracked(self, request: VllmRequest) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = self._requests[request.request_id] = TrackedRequest(request)
        if tracked.names is None:
            adapter = request.lora_request
            digest = NO_ADAPTER if adapter is None else self._adapters.digest(adapter)
            if digest is not None:
                tracked.names = RequestNames(request, digest, self._hash_tokens, self._lineage.secret)
                tracked.offer = Offer(tracked.names, tenant_of(request.cache_salt), [0] * len(self._groups))
        return tracked

    def _begin(self, tracked: TrackedRequest, num_computed: int) -> int | None:
        """Start to load the request's hit. Return None if vLLM must look up again, or 0 if there is no hit."""
        if tracked.is_settled:
            return 0
        is_late = self._is_late(tracked)
        if tracked.names is None or tracked.offer is None:
            adapter = tracked.request.lora_request
            tracked.is_settled = is_late or adapter is None or not self._adapters.is_pending(adapter)
            return 0 if tracked.is_settled else None
        if self._waits_for_mapping(is_late):
            return None
        if not is_late and not self._has_asked(tracked, tracked.names, num_computed):
            return None
        limit = tracked.request.num_tokens - 1
        end = self._num_found(tracked.names, num_computed, limit)
        if not all(group.resumes_inside for group in self._groups):
            limit = min(limit, self._num_named(tracked.names))
            first_hole = self._first_hole(tracked.names, num_computed)
            tracked.junction = longest_single(limit // self._unit * self._unit, self._groups, first_hole)
        if end <= num_computed or is_late:
            tracked.is_settled = True
            self.counts.late_loads += end > num_computed
            return 0
        if sum(each.load is not None and not each.is_settled for each in self._requests.values()) >= MAX_LOADS:
            tracked.asked_at = self._clock()  # wait until another load ends, at its own deadline at the latest
        elif self.is_mapped:
            tracked.load = Load(self._where, tracked.names, tracked.offer.tenant, num_computed, end)
        return None

    def _waits_for_mapping(self, is_late: bool) -> bool:
        """Return whether the request must wait until the workers map the sidecar's memory.

        Without the mapping, the request's blocks could not be stored once they are computed. After one request has
        waited until its deadline, later requests do not wait, because the workers may be unable to map the memory.
        """
        boot = self._tiers.boot
        if self.is_mapped or not self._tiers.is_attached or boot == self._waited_for:
            return False
        if is_late:
            self._waited_for = boot
        return not is_late

    def _has_asked(self, tracked: TrackedRequest, names: RequestNames, num_computed: int) -> bool:
        """Query the remote tier for the blocks that no faster tier holds. Return whether the query is complete."""
        if tracked.inquiry is None:
            inquiries = []
            for group_id, group in enumerate(self._groups if self._tiers.hints.can_ask else ()):
                size = group.block_size
                end = min((tracked.request.num_tokens - 1) // size, names.num_blocks(size))
                wanted = names.of(size, min(num_computed // size, end), end)
                start = 0 if group.forgets else len(self._tiers.find_run(group_id, wanted))
                inquiries.append(self._tiers.hints.inquire(group_id, wanted[start:]))
            tracked.inquiry = AllOf(inquiries)
        return tracked.inquiry.is_done

    def _num_found(self, names: RequestNames, num_computed: int, limit: int) -> int:
        """Return the number of tokens, at most *limit*, that need not be computed if all cached blocks are used.

        The first *num_computed* tokens are in vLLM's own cache, later ones may be in the sidecar's tiers. Returns 0 if
        no later block has a name yet.
        """
        first_hole = self._first_hole(names, num_computed)
        limit = min(limit, self._num_named(names))
        for group_id in self._depend_on_next:
            # The name of the block after a drafter's block covers the token on which the drafter's block depends.
            found = longest_hit(limit, self._groups, first_hole, [group_id])
            limit = max(0, found - self._groups[group_id].block_size)
        return longest_hit(limit // self._unit * self._unit, self._groups, first_hole) if limit > num_computed else 0

    def _num_named(self, names: RequestNames) -> int:
        """Return the number of tokens whose blocks have names in every group."""
        return min(names.num_blocks(group.block_size) * group.block_size for group in self._groups)

    def _first_hole(self, names: RequestNames, num_computed: int) -> Callable[[int, int, int], int]:
        """Return a function that finds the first missing block of a range, see `longest_hit`.

        vLLM itself has the blocks of the first *num_computed* tokens.
        """

        def first_hole(group_id: int, start: int, end: int) -> int:
            size = self._groups[group_id].block_size
            start = max(start, num_computed // size)
            if start >= end:
                return end
            return start + len(self._tiers.find_run(group_id, names.of(size, start, end)))

        return first_hole

    def _plan(self, tracked: TrackedRequest, pages: Pages, start: int, end: int) -> None:
        """Plan the load of tokens *start* to *end* - 1, part of a reported hit, into *pages* in the next step."""
        load, gathered, to_load = tracked.load, self._next, list[int]()
        for group_id, group in enumerate(self._groups):
            size, ids = group.block_size, pages[group_id]
            blocks = [i for i in range(start // size, min(end // size, len(ids))) if ids[i] != NULL_PAGE]
            to_load += [ids[i] for i in blocks]
            slots = [None] * len(blocks) if load is None else load.slots_of(group_id, blocks)
            found = [(ids[i], slot) for i, slot in zip(blocks, slots, strict=True) if slot is not None]
            gathered.unloadable_pages += [ids[i] for i, slot in zip(blocks, slots, strict=True) if slot is None]
            if found:
                gathered.loads.append(PageCopies(group_id, [page for page, _ in found], [slot for _, slot in found]))
        if self.loads_ahead:
            gathered.awaited.append(AwaitedLoad(tracked.request.request_id, frozenset(to_load)))
        if load is not None:
            gathered.loaded.append(load)
            tracked.load = None
            num_tokens = load.tokens_by_tier(start, end)
            self.counts.host_tokens += num_tokens[Tier.HOST]
            self.counts.disk_tokens += num_tokens[Tier.DISK]
            self.counts.remote_tokens += num_tokens[Tier.REMOTE]

    def _refresh(self, tracked: TrackedRequest, end: int) -> None:
        """Mark the blocks that the request reads when it continues at token *end* as recently used.

        They are marked in reverse order, so that the first block is evicted last.
        """
        if tracked.names is None:
            return
        for group_id, group in enumerate(self._groups):
            names = tracked.names.of(group.block_size, group.first_needed(end), end // group.block_size)
            if names:
                self._tiers.refresh(group_id, names[::-1], ())

    def _is_late(self, tracked: TrackedRequest) -> bool:
        return tracked.asked_at is not None and self._clock() - tracked.asked_at >= self._deadline_s

    def _store_computed(
        self, number: int, is_storing: bool, overwritten: Collection[int], staying: Collection[Placement]
    ) -> list[PageCopies]:
        """Reserve host slots for the blocks that the previous step computed, and return the copies into these slots.

        Earlier blocks of the same requests are included if they got no slot yet. *staying* has the placements of the
        requests that run in this step.
        """
        computed, self._computed = self._computed, []
        copies, left = list[PageCopies](), list(self._max_stored)
        why_unstored = self._why_unstored(is_storing)
        for each in computed:
            tracked, now = each.tracked, self._clock()
            num_tokens = each.placement.limit(each.num_tokens)
            if why_unstored is not None:
                tracked.why_unstored = why_unstored
                self.counts.unstored_blocks[why_unstored] += len(each.states)
            elif each.states:
                state_copies, num_lost = self._stores.state_copies(
                    number, each.offer, num_tokens, each.states, each.placement, left, overwritten
                )
                copies += state_copies
                self.counts.unstored_blocks[self._why_no_slot()] += num_lost
            if why_unstored is None and (tracked.is_over or now - tracked.offered_at >= OFFER_PAUSE_S):
                stays = each.placement in staying
                copies += self._stores.copies(
                    number, each.offer, num_tokens, each.placement, left, overwritten, stays=stays
                )
                if self._stores.num_left(each.offer, num_tokens):
                    tracked.offered_at = now
                    tracked.why_unstored = self._why_no_slot()
            if tracked.is_over:
                self._count_unstored(tracked, each.offer, num_tokens)
        return copies

    def _why_no_slot(self) -> Unstored:
        has_room = all(map(self._tiers.has_room, range(len(self._groups))))
        return Unstored.LATE if has_room else Unstored.NO_ROOM

    def _note_computed(
        self,
        request_id: str,
        num_scheduled: int,
        pages_of: Callable[[str], Pages | None],
        states: Sequence[StatePage],
    ) -> None:
        """Record the blocks that the request's pages hold after this step, unless all of them are stored already."""
        tracked = self._requests.get(request_id)
        if tracked is None or (offer := tracked.offer) is None or (placement := tracked.placement) is None:
            return
        request = tracked.request
        num_tokens = min(request.num_computed_tokens + num_scheduled, request.num_tokens)
        if not (states or self._stores.num_left(offer, num_tokens)) or (pages := pages_of(request_id)) is None:
            return
        placement.pages = pages
        self._computed.append(_Computed(tracked, offer, placement, num_tokens, states))

    def _count_unstored(self, tracked: TrackedRequest, offer: Offer, num_tokens: int) -> None:
        self.counts.unstored_blocks[tracked.why_unstored] += self._stores.num_left(offer, num_tokens)

    def _why_unstored(self, is_storing: bool) -> Unstored | None:
        """Return why no block can be stored in this step, or None if blocks can be stored."""
        if not is_storing:
            return Unstored.RESTING
        if not self._tiers.is_attached:
            return Unstored.NO_SIDECAR
        return None if self.is_mapped else Unstored.UNMAPPED

    def _follow(self, num_scheduled: Mapping[str, int], pages_of: Callable[[str], Pages | None]) -> None:
        """Record which pages will hold wrong bytes after this step, because of failed loads."""
        for request_id, num_tokens in num_scheduled.items():
            tracked = self._requests.get(request_id)
            if tracked is None or (placement := tracked.placement) is None:
                continue
            start = tracked.request.num_computed_tokens
            end = start + num_tokens
            if end // self._hash_tokens > start // self._hash_tokens:  # vLLM shares full blocks only
                pages = pages_of(request_id) or placement.pages
                if not any(placement.pages):  # another connector loads for this request
                    placement = tracked.placement = self._taint.place(pages, start)
                placement.pages = pages
            self._taint.on_computed(placement, start, end)

    def _end_placement(self, tracked: TrackedRequest) -> None:
        """Stop tracking the request's pages, because vLLM takes them back.

        `_past` keeps a record of the pages until the workers have reported on all steps so far. A report may still say
        that one of these pages was not loaded.
        """
        if tracked.placement is not None and self._unreported:
            self._past.append(tracked.placement)
        tracked.placement = None

    def _drop(self, tracked: TrackedRequest) -> None:
        if tracked.load is not None:
            tracked.load.release()
            tracked.load = None

    def _on_corrupt(self) -> None:
        self.counts.corrupt_blocks += 1

    def _on_stored(self, num_blocks: int) -> None:
        self.counts.stored_blocks += num_blocks

    def _on_failed(self, num_blocks: int) -> None:
        self.counts.unstored_blocks[Unstored.FAILED] += num_blocks
