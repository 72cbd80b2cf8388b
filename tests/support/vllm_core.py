"""vLLM's prefix-cache core, with or without its CPU offloading, behind the few operations that `prefix_core.py` times.

Only the scheduler's side is imported, so this runs without a GPU: no model, no kernel. It needs vLLM's Python files and
their light dependencies.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

STAND_INS = frozenset({"llguidance", "uvloop", "xgrammar"})  # imported on the way, never called here
MAX_MODEL_TOKENS = 1 << 18
NUM_POOL_BLOCKS = 10_000  # for the small calls
HOST_BLOCK_BYTES = 1 << 16  # any multiple of what vLLM aligns blocks in host memory to: no bytes are moved
_NUMBERS = count()  # of requests


class _StandIn(ModuleType):
    """A module that has every class one asks it for."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIns(MetaPathFinder, Loader):
    """Asked last, so a package that is installed is taken."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in STAND_INS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@cache
def vllm_version() -> str | None:
    """The version of vLLM whose core can be imported here; None without one. Takes seconds the first time."""
    if find_spec("vllm") is None:
        return None
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it logs to stdout, where the results go
    finder = _StandIns()
    sys.meta_path.append(finder)
    try:
        import vllm
        import vllm.v1.request
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: F401
        from vllm.v1.core.kv_cache_utils import init_none_hash
    except ImportError as error:
        print(f"vLLM is left out: {error}", file=sys.stderr)
        return None
    finally:
        sys.meta_path.remove(finder)
    init_none_hash(sha256)  # the root of all chains; for xxhash too, where it is a few bytes longer than xxhash's own
    return str(vllm.__version__)


class VllmCore:
    """A `KVCacheManager` as vLLM's scheduler has one: caching and statistics on, other settings by default.

    *windows* has an entry for each attention group: its sliding window in tokens, or None for full attention. All
    groups share the pool of *num_blocks*. With *events* it records KV events, and each operation takes them.
    """

    def __init__(
        self, num_blocks: int, windows: Sequence[int | None] = (None,), block_size: int = 16, events: bool = False
    ) -> None:
        assert vllm_version() is not None, "ask vllm_version() first"
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

        self.num_lost = 0  # blocks that should have been stored in host memory, and were not
        self._block_size = block_size
        self._events = events
        groups = [
            KVCacheGroupSpec([f"layer.{group_id}"], _attention(block_size, window))
            for group_id, window in enumerate(windows)
        ]
        retention = 0 if any(windows) else None  # 0 is refused without a window
        self._config = KVCacheConfig(num_blocks, [], groups, prefix_cache_retention_interval=retention)
        self._manager = KVCacheManager(
            self._config,
            max_model_len=MAX_MODEL_TOKENS,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_caching=True,
            log_stats=True,
            enable_kv_cache_events=events,
        )

    def prompt(self, token_ids: list[int]) -> Any:
        """A new request with its blocks' hashes: what the scheduler gets."""
        return _request(token_ids, _hasher(self._block_size, "sha256"))

    def serve(self, prompt: Any) -> int:
        """Admit the request, give it slots for all its tokens, cache its full blocks, free it: the tokens that hit.

        With `Scheduler.schedule`'s arguments. Where the scheduler computes a prompt in chunks this is one, which costs
        less.
        """
        manager = self._manager
        blocks, num_hit, _ = manager.get_computed_blocks(prompt)
        allocated = manager.allocate_slots(
            prompt,
            prompt.num_tokens - num_hit,
            num_new_computed_tokens=num_hit,
            new_computed_blocks=blocks,
            full_sequence_must_fit=True,
        )
        assert allocated is not None, "the pool is too small for the prompt"
        manager.record_prefix_cache_stats(prompt, num_hit)
        if self._events:
            manager.take_events()
        manager.free(prompt)
        return int(num_hit)

    def serve_by_chunks(self, prompt: Any, chunk_tokens: int) -> int:
        """The same for a prompt that is computed so many tokens a step, each as `Scheduler.schedule` asks for it."""
        manager = self._manager
        blocks, num_hit, _ = manager.get_computed_blocks(prompt)
        first = {
            "num_new_computed_tokens": num_hit,
            "new_computed_blocks": blocks,
            "full_sequence_must_fit": True,
        }
        done = num_hit
        while done < prompt.num_tokens:
            num_new = min(chunk_tokens, prompt.num_tokens - done)
            allocated = manager.allocate_slots(prompt, num_new, **first)
            assert allocated is not None, "the pool is too small for the prompt"
            first = {}
            done += num_new
            prompt.num_computed_tokens = done
        manager.record_prefix_cache_stats(prompt, num_hit)
        manager.free(prompt)
        return int(num_hit)


class VllmOffloadingCore(VllmCore):
    """A `VllmCore` with vLLM's CPU offloading: an `OffloadingConnectorScheduler` and its `CPUOffloadingManager` (LRU).

    A step makes the calls that `Scheduler.schedule` and `Scheduler.update_from_output` make to the connector. There is
    no worker: each store is reported as finished one step after the step that planned it. All settings are vLLM's
    defaults, so a chunk (the unit that is offloaded) is one block. There is one attention group.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int = 16) -> None:
        super().__init__(num_blocks, block_size=block_size)
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
        from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

        vllm_config = SimpleNamespace(  # the part of a VllmConfig that the connector's scheduler reads
            cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
            parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
            speculative_config=None,
        )
        spec = CPUOffloadingSpec(_offloading(block_size, num_host_blocks))
        self._connector = OffloadingConnectorScheduler(spec, vllm_config, self._config)
        self._in_flight: dict[int, Any] = {}  # stores that the last step planned, by job id
        self._num_planned = 0  # blocks in all stores so far

    def serve_by_chunks(self, prompt: Any, chunk_tokens: int) -> int:
        """Compute the prompt *chunk_tokens* a step, store its blocks in host memory, free it: the tokens that hit."""
        from vllm.v1.request import RequestStatus

        manager, connector, num_planned = self._manager, self._connector, self._num_planned
        connector.on_new_request(prompt)
        blocks, num_hit, _ = manager.get_computed_blocks(prompt)
        num_external, _ = connector.get_num_new_matched_tokens(prompt, num_hit)
        assert not num_external, "loads are not simulated"
        first = {
            "num_new_computed_tokens": num_hit,
            "new_computed_blocks": blocks,
            "full_sequence_must_fit": True,
        }
        prompt.num_computed_tokens = num_hit
        while prompt.num_computed_tokens < prompt.num_tokens:
            num_new = min(chunk_tokens, prompt.num_tokens - prompt.num_computed_tokens)
            allocated = manager.allocate_slots(prompt, num_new, **first)
            assert allocated is not None, "the pool is too small for the prompt"
            if first:
                connector.update_state_after_alloc(prompt, manager.get_blocks(prompt.request_id), 0)
                manager.record_prefix_cache_stats(prompt, num_hit)
            self._step(self._step_of(prompt, num_new, allocated.get_block_ids(), is_new=bool(first)))
            first = {}
            prompt.num_computed_tokens += num_new
        prompt.status = RequestStatus.FINISHED_LENGTH_CAPPED
        connector.request_finished(prompt)
        manager.free(prompt)
        self._step(self._idle_step({prompt.request_id}))
        num_new_blocks = prompt.num_tokens // self._block_size - num_hit // self._block_size
        self.num_lost += num_new_blocks - (self._num_planned - num_planned)
        return int(num_hit)

    def _step(self, scheduled: Any) -> None:
        """Plan the step's stores, and complete those of the step before."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
        from vllm.v1.outputs import KVConnectorOutput

        connector, done = self._connector, OffloadingWorkerMetadata()
        planned = connector.build_connector_meta(scheduled)
        for job_id, job in self._in_flight.items():
            done.mark_completed(job_id)
            done.transfer_stats.store.record(len(job.src_spec.block_ids) * HOST_BLOCK_BYTES, 0.001)
        self._in_flight = planned.store_jobs
        self._num_planned += sum(len(job.src_spec.block_ids) for job in self._in_flight.values())
        connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done))
        connector.get_stats()
        for _ in connector.take_events():
            pass

    @staticmethod
    def _step_of(prompt: Any, num_new: int, block_ids: tuple[list[int], ...], is_new: bool) -> Any:
        """A step that computes tokens of the prompt only."""
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        cached = CachedRequestData.make_empty()
        if not is_new:
            num_computed = [prompt.num_computed_tokens]
            cached = CachedRequestData([prompt.request_id], set(), [], {}, [block_ids], num_computed, [0])
        return SchedulerOutput(
            scheduled_new_reqs=[NewRequestData.from_request(prompt, block_ids)] if is_new else [],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={prompt.request_id: num_new},
            total_num_scheduled_tokens=num_new,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )

    @staticmethod
    def _idle_step(finished: set[str]) -> Any:
        """The step after requests have finished."""
        from vllm.v1.core.sched.output import SchedulerOutput

        step = SchedulerOutput.make_empty()
        step.finished_req_ids = finished
        return step


def vllm_naming(token_ids: list[int], algorithm: str, block_size: int = 16) -> Callable[[], Sequence[bytes]]:
    """Hashes all full blocks of a request when called; the request is made here. *algorithm*: `sha256`, `xxhash`."""
    request, hasher = _request(token_ids, None), _hasher(block_size, algorithm)
    return lambda: hasher(request)


def vllm_small_calls(num_blocks: int, num_times: int) -> Callable[[], None]:
    """Takes, touches and twice frees that many unhashed blocks of a pool when called, *num_times* times."""
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(NUM_POOL_BLOCKS, enable_caching=True, hash_block_size=16)

    def small_calls() -> None:
        for _ in range(num_times):
            blocks = pool.get_new_blocks(num_blocks)
            pool.touch(blocks)
            pool.free_blocks(blocks)
            pool.free_blocks(blocks)

    return small_calls


def _attention(block_size: int, window_tokens: int | None) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    layer = {"block_size": block_size, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    if window_tokens is None:
        return FullAttentionSpec(**layer)
    return SlidingWindowSpec(**layer, sliding_window=window_tokens)


def _offloading(block_size: int, num_host_blocks: int) -> Any:
    """The configuration of vLLM's CPU offloading with room for *num_host_blocks* blocks, as its factory makes it."""
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    return OffloadingConfig(
        groups=(OffloadingGroupConfig(block_size, ("layer.0",), 0),),
        worker_kv_bytes_per_block=HOST_BLOCK_BYTES,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": num_host_blocks * HOST_BLOCK_BYTES},
        engine_id="engine",
        model=OffloadingModelConfig("model", "bfloat16", MAX_MODEL_TOKENS),
        cache=OffloadingCacheConfig(block_size, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )


def _hasher(block_size: int, algorithm: str) -> Callable[[Any], Sequence[bytes]]:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    return get_request_block_hasher(block_size, get_hash_fn_by_name(algorithm))


def _request(token_ids: list[int], hasher: Callable[[Any], Sequence[bytes]] | None) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(f"request-{next(_NUMBERS)}", token_ids, SamplingParams(max_tokens=1), None, block_hasher=hasher)
