"""The SGLang versions and configurations that the backend supports."""

from typing import Any

TESTED = ("0.5.23",)  # with its own controller and host pools, on a CPU: tests/connectors/test_sglang_storage.py
_FACTS = ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model", "model_name")
_OF_POOLS = ("get_page_buffer_meta", "get_size_per_token", "layout", "dtype", "page_size")
KV_POOL = "kv"


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
    """Raise `UnsupportedEngine` if the host pool lacks attributes that describe its pages."""
    _check(pool, _OF_POOLS)


def check_pool_name(name: str) -> None:
    """Raise `UnsupportedEngine` unless *name* is that of the pool of keys and values.

    SGLang hands every other pool, for example that of recurrent states ("mamba"), to `batch_set_v2`, `batch_get_v2` and
    `batch_exists_v2`. The backend has no such methods, and pages of keys and values without a state would be of no use.
    """
    if name != KV_POOL:
        raise UnsupportedEngine(
            f'the pool "{name}" is not supported, because kvtier keeps only the keys and values that SGLang passes to '
            "batch_set_v1 or batch_set, and SGLang passes this pool to batch_set_v2; run this model without "
            "--hicache-storage-backend"
        )


def _check(what: Any, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not hasattr(what, name)]
    if missing:
        raise UnsupportedEngine(
            f"this SGLang's {type(what).__name__} has no {', '.join(missing)}, which the backend needs; "
            f"install a tested version: {', '.join(TESTED)}"
        )
