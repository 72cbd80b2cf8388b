"""Which SGLang the backend knows: the one place where that is said."""

from typing import Any

TESTED = ("0.5.23",)  # with its own controller and host pools, on a CPU: tests/connectors/test_sglang_storage.py
_FACTS = ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model", "model_name")
_OF_POOLS = ("get_page_buffer_meta", "get_size_per_token", "layout", "dtype", "page_size")
KV_POOL = "kv"


class NotServed(ValueError):
    """The backend cannot keep this engine's pages; the message says why, and what to do."""


def check_config(config: Any) -> None:
    """Raise `NotServed` for a SGLang that does not say whose a page is, and for engines that are not served."""
    _check(config, _FACTS)
    if config.is_mla_model and config.tp_size > 1:
        raise NotServed(
            "latent attention (MLA) with tensor parallelism: one rank writes what all read, and kvtier's disk is one "
            "process's; use --tp 1"
        )


def check_pool(pool: Any) -> None:
    """Raise `NotServed` for a host pool whose pages cannot be found."""
    _check(pool, _OF_POOLS)


def check_pool_name(name: str) -> None:
    """Raise `NotServed` for pools beside the one of keys and values: of states, windows, indexers, drafts."""
    if name != KV_POOL:
        raise NotServed(
            f'the pool "{name}": kvtier keeps keys and values of full attention alone; run this model without '
            "--hicache-storage-backend"
        )


def _check(what: Any, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not hasattr(what, name)]
    if missing:
        raise NotServed(
            f"this SGLang's {type(what).__name__} has no {', '.join(missing)}; tested is {', '.join(TESTED)}"
        )
