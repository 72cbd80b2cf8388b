"""vLLM's side of our connector without vLLM: requests, pages, steps and a worker, on a sidecar's endpoint over real
sockets and real shared memory. What is "computed" of a block is bytes that its prompt decides, so a wrong one shows."""

import hashlib
import random
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from attached_bed import NAMESPACE, SidecarBed, SteppedTiers
from chaos import FakeClock
from waiting import wait_for

from kvtier.connectors.vllm_connector.adapters import Adapters
from kvtier.connectors.vllm_connector.build_scheduler_half import host_slots
from kvtier.connectors.vllm_connector.digests import Digests
from kvtier.connectors.vllm_connector.engine_layout import GroupLayout
from kvtier.connectors.vllm_connector.late_stores import LateStores
from kvtier.connectors.vllm_connector.mapped_segment import PAUSE_S, MappedSegment
from kvtier.connectors.vllm_connector.pages import Slots
from kvtier.connectors.vllm_connector.scheduler_side import SchedulerSide
from kvtier.connectors.vllm_connector.step_work import Segment, StepWork, WorkerReport
from kvtier.connectors.vllm_connector.vllm_request import StatePage
from kvtier.connectors.vllm_connector.worker_side import WorkerSide
from kvtier.engine.attached.session import Session, open_session
from kvtier.engine.attached.wire import VERSION, GroupShape, Hello, Map
from kvtier.sidecar.own.block_layout import BlockShape
from kvtier.store.blob_store import BlobStore
from kvtier.tiers.naming.groups import AttentionGroup, FullAttention, RecurrentState, SlidingWindow, alignment
from kvtier.transfer.lane import Finished, InlineLane
from kvtier.transfer.transfer_engine import Route, TransferEngine

BLOCK = 4  # tokens
PAGE_BYTES = 64
NUM_PAGES = 512
NUM_BYTES = 64 << 10
DEADLINE_S = 0.3
NUM_KEPT = 12  # slots of each group
MAX_STORED = 24  # blocks of each group in a step
FULL = (FullAttention(BLOCK),)
HYBRID = (FullAttention(BLOCK), SlidingWindow(BLOCK, 9), SlidingWindow(BLOCK, 9))
STATES = (RecurrentState(BLOCK), FullAttention(BLOCK))


@dataclass(frozen=True)
class FakeAdapter:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class FakeRequest:
    """A request of a prompt, as the connector sees it."""

    request_id: str
    tokens: Sequence[int]
    lora_request: FakeAdapter | None = None
    cache_salt: str | None = None
    num_computed_tokens: int = 0
    shared_prefix_boundary: int = 0
    pages: list[list[int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        hashes, running = [], hashlib.sha256(repr((self.cache_salt, self.lora_request)).encode())
        for start in range(0, len(self.tokens) // BLOCK * BLOCK, BLOCK):
            running.update(bytes(self.tokens[start : start + BLOCK]))
            hashes.append(running.digest())
        return hashes


class InlineThreads(Executor):
    """Does what it is given at once, or when it is told to."""

    def __init__(self) -> None:
        self.is_held = False
        self._held: list[Callable[[], None]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> "Future[Any]":
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*arguments, **options))
            except Exception as error:
                future.set_exception(error)

        self._held.append(run)
        if not self.is_held:
            self.go_on()
        return future

    def go_on(self) -> None:
        """Do what was held."""
        held, self._held = self._held, []
        for run in held:
            run()


class FailingSegment(MappedSegment):
    """A worker's mapping that fails when it is told to."""

    _num_uses: int | None = None

    def fail_after(self, num_uses: int) -> None:
        """Fail once, after it has been used so many times."""
        self._num_uses = num_uses

    def slots(self, group_id: int) -> Slots:
        if self._num_uses is not None:
            self._num_uses -= 1
            if self._num_uses < 0:
                self._num_uses = None
                raise MemoryError
        return super().slots(group_id)


class LastMomentStores(LateStores):
    """Makes each copy no sooner than it must."""

    def begin(self) -> None:
        pass


class ConnectorBed:
    """One engine on one sidecar. *groups* have layers of two pages each, of each of *num_workers*."""

    def __init__(
        self,
        groups: Sequence[AttentionGroup] = FULL,
        store: BlobStore | None = None,
        num_bytes: int = NUM_BYTES,
        seed: int = 0,
        num_workers: int = 1,
        depend_on_next: Collection[int] = (),
        num_replicas: int = 1,
    ) -> None:
        """*num_replicas*: so many consecutive workers compute equal pages."""
        self._depend_on_next = depend_on_next
        self._num_replicas = num_replicas
        self.state_interval: int | None = None
        self.clock = FakeClock()
        self.rng = random.Random(seed)
        self.groups = groups
        self.layouts = [
            GroupLayout(group, (f"g{i}.0", f"g{i}.1"), (PAGE_BYTES, PAGE_BYTES), num_workers, num_replicas=num_replicas)
            for i, group in enumerate(groups)
        ]
        shapes = [
            BlockShape(each.attention.block_size, each.attention.forgets, each.block_bytes, each.attention.keeps_states)
            for each in self.layouts
        ]
        self.sidecar = SidecarBed(shapes, num_bytes, num_bytes // 8, store, self.clock, _inline_lanes)
        self._shapes = [GroupShape(*shape) for shape in shapes]
        self.threads = InlineThreads()
        self.rank_caches = [
            {
                name: torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8)
                for layout in self.layouts
                for name in layout.layer_names
            }
            for _ in range(num_workers)
        ]
        self.kv_caches = self.rank_caches[0]
        self._num_requests = 0
        self.start_engine()

    def start_engine(self) -> None:
        """Have a new engine, which knows nothing."""
        hello = Hello(VERSION, "a test", "a model", NAMESPACE, self._shapes)
        finished = _inline_lanes()
        self.memories = [host_slots(layout.block_bytes) for layout in self.layouts]
        num_kept = [NUM_KEPT for _ in self.groups]
        self.tiers = SteppedTiers(
            self.sidecar,
            list(self.groups),
            self.memories,
            finished,
            self.clock,
            num_kept=num_kept,
            engine=hello.engine,
        )
        self.adapters = Adapters(self.threads)
        self.side = SchedulerSide(
            self.tiers,
            lambda boot: Segment(boot, self.sidecar.path, hello),
            list(self.groups),
            self.memories,
            Digests(self.threads, lambda tell: tell()),
            self.adapters,
            hash_tokens=BLOCK,
            num_workers=len(self.rank_caches),
            max_stored=[MAX_STORED for _ in self.groups],
            deadline_s=DEADLINE_S,
            depend_on_next=self._depend_on_next,
            clock=self.clock,
        )
        block_bytes = [each.block_bytes for each in self.layouts]
        self.segments = [FailingSegment(block_bytes, self.clock, self._attach, None) for _ in self.rank_caches]
        self.workers = [
            WorkerSide(self.layouts, rank, segment, LastMomentStores()) for rank, segment in enumerate(self.segments)
        ]
        for worker, caches in zip(self.workers, self.rank_caches, strict=True):
            worker.register(caches, NUM_PAGES)
        self.worker, self.segment = self.workers[0], self.segments[0]
        self._free = list(range(1, NUM_PAGES))
        self.rng.shuffle(self._free)
        self.listen()

    def close(self) -> None:
        """End engine and sidecar."""
        self.tiers.close()
        for worker in self.workers:
            worker.close()
        self.sidecar.close()

    def listen(self) -> None:
        """Let both sides say what they have to."""
        self.tiers.stir()
        while not self.tiers.is_quiet:
            self.side.poll()

    def request(self, tokens: Sequence[int], **options: Any) -> FakeRequest:
        """A new request."""
        self._num_requests += 1
        return FakeRequest(f"r{self._num_requests}", tokens, **options)

    def prompt(self, num_tokens: int) -> list[int]:
        """Tokens that no other prompt begins with."""
        return [self.rng.randrange(256) for _ in range(num_tokens)]

    def step(
        self,
        num_scheduled: dict[str, int] | None = None,
        *requests: FakeRequest,
        meet: Callable[[], None] = lambda: None,
        overwritten: Collection[int] = (),
    ) -> StepWork:
        """One of vLLM's steps: stores of the step before, loads, computing, and what the worker says of it."""
        pages = {request.request_id: request.pages for request in requests}
        states = {
            request.request_id: self.states(
                request, request.num_computed_tokens, (num_scheduled or {})[request.request_id]
            )
            for request in requests
        }
        work = self.side.step(num_scheduled or {}, pages.get, overwritten=overwritten, states=states)
        meet()
        self.work(work, lambda: self._compute(num_scheduled or {}, requests))
        return work

    def states(self, request: FakeRequest, start: int, num_tokens: int) -> list[StatePage]:
        """The pages of recurrent states that vLLM says it has when these tokens are computed: those of the last block
        that they complete before the prompt's last token, that at the shared boundary, and of every
        *state_interval* blocks."""
        end = start + num_tokens
        last = min(end, request.num_tokens - 1) // BLOCK
        ends = range(start // BLOCK + 1, end // BLOCK + 1)
        always = (last, request.shared_prefix_boundary // BLOCK)
        kept = [i for i in ends if i in always or (self.state_interval and i % self.state_interval == 0)]
        return [
            StatePage(group_id, request.pages[group_id][i - 1], i * BLOCK)
            for group_id, group in enumerate(self.groups)
            for i in (kept if not group.resumes_inside else ())
        ]

    def work(self, work: StepWork, compute: Callable[[], None] = lambda: None) -> WorkerReport | None:
        """The workers' part, and the scheduler's learning of it."""
        report = self.work_unheard(work, compute)
        if report is not None:
            self.side.on_report(report)
        return report

    def work_unheard(self, work: StepWork, compute: Callable[[], None] = lambda: None) -> WorkerReport | None:
        """The workers' part, and what they say of it."""
        if work.wanted is not None:
            self._map(work.wanted)
        for worker in self.workers:
            with suppress(MemoryError):
                worker.store(work)
            worker.begin(work)
            with suppress(MemoryError):
                worker.load(work)
        compute()
        for worker in self.workers:
            worker.store_late()
        reports = [report for worker in self.workers if (report := worker.report(work)) is not None]
        return reduce(WorkerReport.aggregate, reports) if reports else None

    def match(self, request: FakeRequest, num_computed: int = 0, step_s: float = 0.01) -> int:
        """What the request is told to load, asked in steps of *step_s* as long as it is not known."""
        while (matched := self.side.num_matched(request, num_computed)) is None:
            self.step()
            self.side.poll()
            self.clock.now += step_s
        return matched

    def allocate(
        self, request: FakeRequest, num_matched: int, num_local: int = 0, like: FakeRequest | None = None
    ) -> None:
        """Give the request pages, null ones where a window has passed, and tell the connector. The first *num_local*
        tokens are in the pages of the request *like*."""
        request.pages = []
        for group_id, group in enumerate(self.groups):
            first, size = group.first_needed(num_local + num_matched), group.block_size
            ids = [0] * first + (like.pages[group_id][first : num_local // size] if like is not None else [])
            taken = [self._free.pop() for _ in range(len(ids), -(-request.num_tokens // size))]
            request.pages.append(ids + taken)
        self.side.on_allocated(request, request.pages, num_matched)
        request.num_computed_tokens = num_local + num_matched

    def run(self, request: FakeRequest) -> int:
        """Serve the request from its question to its end; how many tokens were loaded. Every page is then right."""
        num_matched = self.match(request)
        self.allocate(request, num_matched)
        if num_matched and self.side.loads_ahead:
            self.load_ahead(request)
        self.compute(request)
        self.finish(request)
        return num_matched

    def load_ahead(self, request: FakeRequest) -> None:
        """The step in which a request's blocks are loaded, and it does not run."""
        work = self.step()
        for worker in self.workers:
            assert worker.ended_loads(work) == ({request.request_id}, set())
        self.side.on_allocated(request, request.pages, 0)

    def compute(self, request: FakeRequest, meet: Callable[[], None] = lambda: None) -> None:
        """The step that computes what is missing of the prompt, and one more, which stores it and computes a token.
        *meet* is called between what the scheduler and what the worker does."""
        num_missing = request.num_tokens - request.num_computed_tokens
        self.step({request.request_id: num_missing}, request, meet=meet)
        request.num_computed_tokens = request.num_tokens
        self.check_pages(request)
        self.side.poll()
        self.clock.now += 0.03
        self.step({request.request_id: 0}, request, meet=meet)
        self.side.poll()

    def compute_unstored(self, request: FakeRequest) -> None:
        """As `compute`, with a worker that fails to copy."""
        for num_scheduled in (request.num_tokens, 0):
            work = self.side.step({request.request_id: num_scheduled}, {request.request_id: request.pages}.get)
            request.num_computed_tokens = request.num_tokens
            self.side.on_report(WorkerReport(work.number, None, unstored=(work.number,)))
            self.side.poll()
            self.clock.now += 0.03

    def finish(self, request: FakeRequest) -> None:
        """End the request, have the step after that, and let both sides say what they have to."""
        self.finish_without_listening(request)
        self.listen()
        self.step()
        self.listen()

    def end(self, *requests: FakeRequest) -> None:
        """As `finish`, of requests whose pages go to no others."""
        for request in requests:
            self.side.on_finished(request)
        self.listen()
        self.step()
        self.listen()

    def finish_without_listening(self, request: FakeRequest) -> None:
        """End the request, and give its pages to others."""
        self.side.on_finished(request)
        self._free = [page for ids in request.pages for page in ids if page] + self._free

    def meet_fate(self) -> None:
        """Something may become of the sidecar, or nothing."""
        fate = self.rng.random()
        if fate < 0.04:
            self.sidecar.die()
        elif fate < 0.08:
            self.sidecar.is_stopped = True
        elif fate < 0.3:
            self.make_well()

    def make_well(self) -> None:
        """Have a sidecar that is there and answers."""
        self.sidecar.is_stopped = False
        self.listen()  # to what it had to say
        if not self.sidecar.is_alive:
            self.sidecar.start()
        self.listen()

    def check_pages(self, request: FakeRequest) -> None:
        """Raise AssertionError for a page that has other bytes than the request's prompt decides."""
        assert self.first_wrong(request, request.num_tokens) is None, "a block is wrong"

    def first_wrong(self, request: FakeRequest, num_tokens: int) -> int | None:
        """The first block among so many tokens of which some page has other bytes than the prompt decides."""
        return next((i for i in range(num_tokens // BLOCK) if not self._is_right(request, i)), None)

    def _is_right(self, request: FakeRequest, block: int) -> bool:
        return all(
            bytes(caches[name][ids[block]].numpy()) == _bytes_of(request, block, name, rank // self._num_replicas)
            for rank, caches in enumerate(self.rank_caches)
            for layout, ids in zip(self.layouts, request.pages, strict=True)
            for name in (layout.layer_names if ids[block] else ())
        )

    def check(self) -> None:
        """Raise AssertionError if any two books disagree."""
        self.sidecar.check()
        self.side.check()

    def reserve_ahead(self, num_slots: int) -> None:
        """Have so many slots of the first group lie ready."""
        self.tiers.reserve(0, num_slots)
        self.listen()

    def leased(self) -> int:
        """Blocks and slots that the sidecar has leased to its engines, less the slots that always lie ready."""
        self.clock.now += 1.0
        self.listen()
        num_leased = sum(lease.num_chunks for client in self.sidecar.endpoint.clients() for lease in client.leases)
        return num_leased - NUM_KEPT * len(self.groups)

    def _compute(self, num_scheduled: dict[str, int], requests: Sequence[FakeRequest]) -> None:
        for request in requests:
            start = request.num_computed_tokens
            self.compute_tokens(request, start, start + num_scheduled[request.request_id])

    def compute_tokens(self, request: FakeRequest, start: int, end: int) -> None:
        """Fill the pages of the blocks that these tokens complete. From wrong pages wrong ones are computed."""
        salt = b"" if self.first_wrong(request, start) is None else b"wrong"
        for block in range(start // BLOCK, end // BLOCK):
            for rank, caches in enumerate(self.rank_caches):
                for layout, ids in zip(self.layouts, request.pages, strict=True):
                    for name in layout.layer_names if ids[block] else ():
                        content = bytearray(_bytes_of(request, block, name, rank // self._num_replicas, salt))
                        caches[name][ids[block]] = torch.frombuffer(content, dtype=torch.uint8)

    def _map(self, wanted: Segment) -> None:
        """Wait until the workers' threads have mapped the segment, or have failed to."""
        self.clock.now += PAUSE_S
        for worker, segment in zip(self.workers, self.segments, strict=True):
            worker.begin(StepWork(0, wanted))
            wait_for(lambda segment=segment: not segment.is_mapping)  # type: ignore[misc]

    def _attach(self, path: str, hello: Hello | Map) -> Session:
        if self.sidecar.is_stopped:
            raise TimeoutError("it does not answer")
        with ThreadPoolExecutor(1) as threads:
            opening = threads.submit(open_session, path, hello, 5)
            while not opening.done():
                self.sidecar.turn()
        return opening.result()


def _inline_lanes() -> TransferEngine:
    finished = Finished()
    return TransferEngine({route: InlineLane(finished) for route in Route}, finished)


def _bytes_of(request: FakeRequest, block: int, layer: str, rank: int, salt: bytes = b"") -> bytes:
    """What a page has that was computed rightly; with a *salt*, one that was not."""
    place = f"{layer} of {rank}".encode()
    return hashlib.shake_256(request.block_hashes[block] + place + salt).digest(PAGE_BYTES)


def blocks_aligned(groups: Sequence[AttentionGroup], num_tokens: int) -> int:
    """The tokens of a prompt of so many that can be loaded."""
    return (num_tokens - 1) // alignment(groups) * alignment(groups)
