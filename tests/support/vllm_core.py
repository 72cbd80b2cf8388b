"""vLLM's prefix-cache core on a machine without a GPU, behind the few operations that `prefix_core.py` times.

Only its scheduler's side is imported: no model, no kernel. It needs vLLM's Python files and their light dependencies.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

STAND_INS = frozenset({"llguidance", "uvloop", "xgrammar"})  # imported on the way, never called here
MAX_MODEL_TOKENS = 1 << 18
NUM_POOL_BLOCKS = 10_000  # for the small calls


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

        self._block_size = block_size
        self._events = events
        groups = [
            KVCacheGroupSpec([f"layer.{group_id}"], _attention(block_size, window))
            for group_id, window in enumerate(windows)
        ]
        retention = 0 if any(windows) else None  # 0 is refused without a window
        self._manager = KVCacheManager(
            KVCacheConfig(num_blocks, [], groups, prefix_cache_retention_interval=retention),
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


def _hasher(block_size: int, algorithm: str) -> Callable[[Any], Sequence[bytes]]:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    return get_request_block_hasher(block_size, get_hash_fn_by_name(algorithm))


def _request(token_ids: list[int], hasher: Callable[[Any], Sequence[bytes]] | None) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request("request", token_ids, SamplingParams(max_tokens=1), None, block_hasher=hasher)
