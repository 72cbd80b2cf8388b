"""A small scheduler that treats requests as vLLM's does: chunked prefill, a prefix cache of its own, preemption, steps
in flight, and both of its policies for failed loads. It plays on a `ConnectorBed` with one group of full attention."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm_connector_bed import BLOCK, ConnectorBed, FakeRequest

from kvtier.connectors.vllm_connector.step_work import StepWork

NUM_PAGES = 64
MAX_RUNNING = 4


@dataclass
class _InFlight:
    """A step that the workers have still to do."""

    work: StepWork
    parts: list[tuple[FakeRequest, int, int]]  # each with its pages in this step, and the tokens that it computes


@dataclass
class VllmPlay:
    """Requests from their arrival to their end. *max_in_flight* is 1 without asynchronous scheduling."""

    bed: ConnectorBed
    recomputes: bool
    max_in_flight: int
    num_failed_loads: int = 0
    _waiting: list[FakeRequest] = field(default_factory=list)
    _running: list[FakeRequest] = field(default_factory=list)
    _in_flight: deque[_InFlight] = field(default_factory=deque)
    _cached: dict[bytes, int] = field(default_factory=dict)  # by a block's hash
    _hash_of: dict[int, bytes] = field(default_factory=dict)
    _num_users: list[int] = field(default_factory=lambda: [0] * NUM_PAGES)
    _has_ended: bool = False  # a request, since the last step: vLLM has one more, in which nothing may be computed
    _free: list[int] = field(default_factory=lambda: list(range(1, NUM_PAGES)))  # the next one to be taken first

    @property
    def is_idle(self) -> bool:
        """Whether all requests have ended."""
        return not (self._waiting or self._running or self._in_flight or self._has_ended)

    def add(self, tokens: Sequence[int]) -> None:
        """A request arrives."""
        self._waiting.append(self.bed.request(tokens))

    def step(self) -> None:
        """Schedule a step, and have the oldest one done if enough are in flight."""
        self._schedule()
        while len(self._in_flight) >= (self.max_in_flight if self._running else 1):
            self._finish_step()
        self.bed.side.poll()
        self.bed.clock.now += 0.03

    def preempt(self) -> None:
        """Take the pages of the newest request."""
        if self._running:
            request = self._running.pop()
            self._free_pages(request)
            request.num_computed_tokens = 0
            self._waiting.insert(0, request)

    def abort(self) -> None:
        """End the oldest request."""
        if self._running:
            self._end(self._running[0])

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._cached.clear()
        self._hash_of.clear()

    def _schedule(self) -> None:
        self._has_ended = False
        num_scheduled: dict[str, int] = {}
        for request in self._running:
            if num_tokens := min(self._chunk(), request.num_tokens - request.num_computed_tokens):
                self._grow(request, num_tokens)
                num_scheduled[request.request_id] = num_tokens
        while self._waiting and len(self._running) < MAX_RUNNING:
            request = self._waiting[0]
            hit = self._hit(request)
            num_local = len(hit) * BLOCK
            num_matched = self.bed.side.num_matched(request, num_local)
            if num_matched is None:
                break
            self._running.append(self._waiting.pop(0))
            request.pages = [hit]
            for page in hit:
                self._use(page)
            request.num_computed_tokens = num_local + num_matched
            num_tokens = min(self._chunk(), request.num_tokens - request.num_computed_tokens)
            self._grow(request, num_tokens)
            self.bed.side.on_allocated(request, [list(ids) for ids in request.pages], num_matched)
            num_scheduled[request.request_id] = num_tokens
        running = {request.request_id: request for request in self._running}
        work = self.bed.side.step(num_scheduled, lambda name: [list(ids) for ids in running[name].pages])
        parts = []
        for name, num_tokens in num_scheduled.items():
            request = running[name]
            start = request.num_computed_tokens
            parts.append((replace(request, pages=[list(request.pages[0])]), start, start + num_tokens))
            request.num_computed_tokens += num_tokens
        self._in_flight.append(_InFlight(work, parts))

    def _finish_step(self) -> None:
        step = self._in_flight.popleft()
        for segment in self.bed.segments:
            if step.work.loads and self.bed.rng.random() < 0.3:
                fails_at = self.bed.rng.randrange(len(step.work.stores) + len(step.work.loads))
                self.num_failed_loads += fails_at >= len(step.work.stores)
                segment.fail_after(fails_at)

        def compute() -> None:
            for request, start, end in step.parts:
                self.bed.compute_tokens(request, start, end)

        report = self.bed.work_unheard(step.work, compute)
        unloaded = {page for worker in self.bed.workers for page in worker.pop_failed_pages()}
        failed = self._on_unloaded(unloaded, step) if unloaded else []
        for request, _, _ in step.parts:
            for running in [each for each in self._running if each.request_id == request.request_id]:
                if running not in failed and running.num_computed_tokens >= running.num_tokens:
                    self._end(running)
        for request in failed if not self.recomputes else ():
            self._end(request)
        if report is not None:
            self.bed.side.on_report(report)

    def _on_unloaded(self, unloaded: set[int], step: _InFlight) -> list[FakeRequest]:
        """As vLLM's `_update_requests_with_invalid_blocks`."""
        num_scheduled = {request.request_id: end - start for request, start, end in step.parts}
        marked: set[int] = set()
        failed = []
        for request in self._running:
            num_computed = request.num_computed_tokens - num_scheduled.get(request.request_id, 0)
            wrong = [i for i in range(-(-num_computed // BLOCK)) if request.pages[0][i] in unloaded]
            if not wrong:
                continue
            failed.append(request)
            own = [i for i in wrong if request.pages[0][i] not in marked]
            marked.update(request.pages[0][i] for i in own)
            request.num_computed_tokens = own[0] * BLOCK if own else num_computed
            for page in request.pages[0][own[0] :] if own and not self.recomputes else ():
                self._uncache(page)
        return failed

    def _chunk(self) -> int:
        return self.bed.rng.randrange(1, 6) * BLOCK - self.bed.rng.randrange(BLOCK)

    def _hit(self, request: FakeRequest) -> list[int]:
        hit: list[int] = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            if block_hash not in self._cached:
                break
            hit.append(self._cached[block_hash])
        return hit

    def _grow(self, request: FakeRequest, num_tokens: int) -> None:
        """Pages for so many tokens more; vLLM's cache has the full ones at once."""
        end = request.num_computed_tokens + num_tokens
        ids = request.pages[0]
        while len(ids) * BLOCK < end:
            page = self._free[0]
            self._uncache(page)
            self._use(page)
            ids.append(page)
        for block, block_hash in enumerate(request.block_hashes[: end // BLOCK]):
            if block_hash not in self._cached and ids[block] not in self._hash_of:
                self._cached[block_hash], self._hash_of[ids[block]] = ids[block], block_hash

    def _use(self, page: int) -> None:
        if not self._num_users[page]:
            self._free.remove(page)
        self._num_users[page] += 1

    def _free_pages(self, request: FakeRequest) -> None:
        for page in request.pages[0][::-1]:
            self._num_users[page] -= 1
            if not self._num_users[page]:
                self._free.append(page)

    def _uncache(self, page: int) -> None:
        block_hash = self._hash_of.pop(page, None)
        if block_hash is not None:
            del self._cached[block_hash]

    def _end(self, request: FakeRequest) -> None:
        if request in self._running:
            self._running.remove(request)
            self._has_ended = True
            self.bed.side.on_finished(request)
            self._free_pages(request)
