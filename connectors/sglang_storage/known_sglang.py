"""The SGLang versions and configurations that the backend supports."""

from typing import Any

from kvtier.connectors.sglang_storage.page_runs import PageRuns

TESTED = ("0.5.23",)  # with its own controller and host pools, on a CPU: tests/connectors/test_sglang_*.py
_FACTS = ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model", "model_name")
_OF_POOLS = ("get_page_buffer_meta", "get_size_per_token", "layout", "dtype", "page_size")
_OF_STORAGE = ("register_mem_host_pool_v2", "on_host_pools_registered")
KV_POOL = "kv"
SIDE_POOLS = ("mamba", "swa", "indexer")  # states, sliding windows, keys by which attention selects tokens


class UnsupportedEngine(ValueError):
    """The error for an engine that the backend does not support. The message has the reason and the remedy."""


def check_config(config: Any) -> None:
    """Raise `UnsupportedEngine` if *config* lacks attributes that the backend needs, or combines MLA with tp > 1."""
    _check(config, _FACTS)
    if config.is_mla_model and config.tp_size > 1:
        raise UnsupportedEngine(
            "latent attention (MLA) with tensor parallelism is not supported, because one rank writes pages that all "
            "ranks read, and kvtier's disk belongs to one process; use --tp 1"
        )


def check_pool(pool: Any) -> None:
    """Raise `UnsupportedEngine` if the host pool of keys and values has no pages, or does not describe them."""
    if getattr(pool, "size_per_token", None) == 0:
        raise UnsupportedEngine(
            "compressed attention (DeepSeek V4) is not supported, because its host pool of keys and values has no "
            "bytes, and kvtier does not keep the pools of compressed keys; run this model without "
            "--hicache-storage-backend"
        )
    _check(pool, _OF_POOLS)


def check_side_pool(name: str, pool: Any) -> None:
    """Raise `UnsupportedEngine` if kvtier cannot keep the host pool *name*, which SGLang has beside keys and values."""
    if name.startswith("draft"):
        raise UnsupportedEngine(
            f'the pool "{name}" of a draft model is not supported, because kvtier does not store the pages of draft '
            "models; run without speculative decoding or without --hicache-storage-backend"
        )
    if name not in SIDE_POOLS:
        raise UnsupportedEngine(
            f'the pool "{name}" is not supported, because kvtier does not know which of its pages a cached prefix '
            f"needs (only for {', '.join(SIDE_POOLS)}); run this model without --hicache-storage-backend"
        )
    _check(pool, _OF_POOLS)


def pages_in_place(name: str, pool: Any) -> PageRuns:
    """Return where the pages of a host pool lie. Raise `UnsupportedEngine` if SGLang does not reveal that."""
    try:
        return PageRuns(pool)
    except (ValueError, NotImplementedError) as error:
        raise UnsupportedEngine(
            f'the pool "{name}" is not supported, because SGLang does not reveal where its pages lie ({error}); '
            "for most models, --hicache-mem-layout page_first helps; otherwise run without --hicache-storage-backend"
        ) from None


def check_storage(storage: type) -> None:
    """Raise `UnsupportedEngine` if this SGLang does not tell a storage backend when it has all host pools."""
    _require(_OF_STORAGE, storage, storage.__name__)


def _check(what: Any, names: tuple[str, ...]) -> None:
    _require(names, what, type(what).__name__)


def _require(names: tuple[str, ...], what: Any, called: str) -> None:
    missing = [name for name in names if not hasattr(what, name)]
    if missing:
        raise UnsupportedEngine(
            f"this SGLang's {called} has no {', '.join(missing)}, which the backend needs; "
            f"install a tested version: {', '.join(TESTED)}"
        )
