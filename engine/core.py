"""EngineCore: model, cache and scheduler as one machine that is stepped. One thread owns it."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvtier.engine.config import Config, DiskConfig
from kvtier.engine.detokenizer import Detokenizer
from kvtier.engine.request import Request
from kvtier.engine.runner import Chunk, ModelRunner
from kvtier.engine.sampling import SamplingParams
from kvtier.engine.scheduler import Scheduler, Work
from kvtier.store.codec import NO_CODEC, Codec, ZstdPlaneCodec
from kvtier.store.lmdb_store import LmdbStore
from kvtier.tiers.block_hash import BlockChain, ExtraKeys, HashAlgorithm
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.disk_tier import DiskTier
from kvtier.tiers.statistics import CacheStatistics, TokenBalance
from kvtier.tiers.tier import Tier
from kvtier.transfer.lane import Finished, Lane, ThreadLane
from kvtier.transfer.transfer_engine import Route, TransferEngine

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05
SNAPSHOT_EVERY_S = 0.25
NUM_READERS = 2  # threads that read from disk; verifying one block overlaps reading the next
STORE_NICENESS = 10  # writing to disk goes behind computing: on 2 cores a step beside it took twice as long
FLUSH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The engine at one moment, by value: for dashboards and other threads."""

    cache: CacheStatistics
    tokens: TokenBalance  # of all prompts admitted
    num_waiting: int
    num_promoting: int
    num_running: int


class EngineCore:
    """Add requests, call `step` until `has_work` is False, read the requests. Close it: that is when the disk tier
    gets everything, so that the next start is warm.

    Raises `UnsupportedModel` for a model whose attention cannot be paged, ValueError for sizes that cannot work, and
    `StoreInUse` if another process has the store.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self._runner = ModelRunner(model, config.device.block_size, config.device.capacity)
        namespace = self._runner.namespace(config.names.algorithm, config.names.seed)
        memories = self._runner.memories(0 if config.host is None else config.host.capacity)
        self._store = None if config.disk is None else _open_store(config.disk, model)
        disk = None if self._store is None else DiskTier(self._store, namespace.digest)
        self.cache = TieredCache(self._runner.groups, memories, _transfers(self._runner), disk)
        timeout_s = None if config.disk is None else config.disk.read_timeout_s
        self._scheduler = Scheduler(self.cache, config.scheduler, timeout_s)
        self._end_token_ids = _end_token_ids(model)
        self._closed = False
        self.statistics = self._snapshot()
        self._snapshot_at = time.monotonic()

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return self._scheduler.has_work

    def add(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        extra: ExtraKeys,
        arrived_at: float,
        reads_cache: bool = True,
    ) -> Request:
        """Queue a prompt. ValueError, with what to do, if it is empty, can never fit, or the queue is full."""
        if not len(token_ids):
            raise ValueError("prompt: has no tokens; give at least one")
        chain = self._name(token_ids, extra)
        detokenizer = Detokenizer(self.tokenizer, sampling.stop)
        request = Request(token_ids, sampling, chain, detokenizer, reads_cache, arrived_at)
        self._scheduler.add(request)
        return request

    def where(self, token_ids: Sequence[int], extra: ExtraKeys) -> dict[str, int]:
        """Tokens of a prompt by the coldest tier that they would come from, or "nowhere"."""
        block_size = self.config.device.block_size
        counts = dict.fromkeys([*Tier, "nowhere"], 0)
        for tier in self.cache.where(self._name(token_ids, extra).names):
            counts["nowhere" if tier is None else tier] += block_size
        counts["nowhere"] += len(token_ids) % block_size
        return {str(place): num_tokens for place, num_tokens in counts.items()}

    def abort(self, request: Request) -> None:
        """End a request; nothing of it stays leased."""
        self._scheduler.abort(request)

    def step(self) -> list[Request]:
        """Compute one batch; the requests that got a token, with `new_text`. Waits a moment if all are parked."""
        work = self._scheduler.schedule()
        self.cache.spill()
        advanced = self._compute(work) if work else []
        if not work:
            self.cache.wait(IDLE_WAIT_S)
        if not self.has_work or time.monotonic() - self._snapshot_at > SNAPSHOT_EVERY_S:
            self.statistics = self._snapshot()
            self._snapshot_at = time.monotonic()
        return advanced

    def idle(self) -> None:
        """Between requests: go on copying cold blocks down."""
        self.cache.wait(0.0)
        self.cache.spill()
        self.statistics = self._snapshot()

    def close(self, progress: Callable[[int], None] = lambda num_left: None) -> None:
        """Abort what runs, write what is cached to disk, end threads. *progress* gets the blocks still to write."""
        if self._closed:
            return
        self._closed = True
        for request in [*self._scheduler.waiting, *self._scheduler.promoting, *self._scheduler.running]:
            self._scheduler.abort(request)
        if self._store is not None and (num_left := self.cache.flush(FLUSH_TIMEOUT_S, progress)):
            log.warning("flush: %d blocks did not reach the disk in time; they will be recomputed", num_left)
        self.cache.close()
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _name(self, token_ids: Sequence[int], extra: ExtraKeys) -> BlockChain:
        names = self.config.names
        algorithm = HashAlgorithm(names.algorithm)
        chain = BlockChain(self.config.device.block_size, extra, algorithm=algorithm, seed=names.seed)
        chain.extend(token_ids)
        return chain

    def _compute(self, work: Sequence[Work]) -> list[Request]:
        logits = self._runner.run(
            [
                Chunk(
                    item.request.token_ids[item.request.num_computed : item.request.num_computed + item.num_tokens],
                    item.request.num_computed,
                    item.request.tables,
                )
                for item in work
            ]
        )
        self._scheduler.computed(work)
        advanced = []
        for row, item in enumerate(work):
            request = item.request
            if request.num_to_compute == 0:  # else only a part of the prompt is in, and its logits predict nothing new
                request.append(request.sampler.sample(logits[row]), self._end_token_ids)
                advanced.append(request)
                if request.finish_reason is not None:
                    self._scheduler.retire(request)
        return advanced

    def _snapshot(self) -> EngineStatistics:
        scheduler = self._scheduler
        return EngineStatistics(
            self.cache.statistics(),
            scheduler.admitted_tokens,
            len(scheduler.waiting),
            len(scheduler.promoting),
            len(scheduler.running),
        )


def _open_store(config: DiskConfig, model: PreTrainedModel) -> LmdbStore:
    element_bytes = model.dtype.itemsize
    codec: Codec = ZstdPlaneCodec(element_bytes) if config.codec == "zstd" else NO_CODEC
    return LmdbStore(Path(config.path), config.capacity, codec)


def _transfers(runner: ModelRunner) -> TransferEngine:
    """Lanes for the runner's device: streams on CUDA, threads elsewhere; disk always has threads of its own."""
    finished: Finished = Finished()
    lanes: dict[Route, Lane] = {
        Route.HOST_TO_DISK: ThreadLane(finished, "store", niceness=STORE_NICENESS),
        Route.DISK_TO_HOST: ThreadLane(finished, "load", num_threads=NUM_READERS),
    }
    for route in (Route.DEVICE_TO_HOST, Route.HOST_TO_DEVICE):
        if runner.device.type == "cuda":
            from kvtier.transfer.cuda_lane import CudaLane

            lanes[route] = CudaLane(finished, route, runner.device)
        else:
            lanes[route] = ThreadLane(finished, route)
    return TransferEngine(lanes, finished)


def _end_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """The token ids that end a text, from the model's generation settings, else from its configuration."""
    generation = getattr(model, "generation_config", None)
    for source in (generation, model.config):
        end = getattr(source, "eos_token_id", None)
        if end is not None:
            return frozenset([end] if isinstance(end, int) else end)
    return frozenset()
