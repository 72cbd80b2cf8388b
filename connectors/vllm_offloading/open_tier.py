"""Construction of the disk tier from KVTier's settings, without vLLM's classes."""

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvtier.connectors.disk_below.open import open_disk_below
from kvtier.connectors.vllm_connector.engine_facts import engine_facts
from kvtier.connectors.vllm_connector.engine_layout import namespace_of
from kvtier.connectors.vllm_offloading.known_vllm import pool_facts
from kvtier.connectors.vllm_offloading.tier_side import TierSide
from kvtier.engine.config import DiskConfig, tree_from_dict
from kvtier.store.process.store_process import SWITCH_INTERVAL_S

INDEXED_WAIT_S = 10.0  # max wait for the index of the blocks on disk; the rest is indexed during the first requests
# Number of read timeouts within which all jobs end even if the disk hangs: one for jobs that have begun and one for
# queued jobs, times 2 for slow machines.
LONGEST_JOBS = 4
WEIGHTS_KEY = '"weights" in the configuration of KVTier'


class TierSettings(DiskConfig, frozen=True, kw_only=True):
    """The settings of `KVTier`: the keys of kvtier's `[disk]` table, and *weights*.

    *weights* is a name for the model's weights. By default, it is None and the weights' digest is computed.
    """

    weights: Annotated[str, msgspec.Meta(min_length=1)] | None = None


def tier_settings(config: Mapping[str, object]) -> TierSettings:
    """Return the settings. Raise ValueError, which names the key, if a setting is unknown or out of range."""
    return tree_from_dict(TierSettings, config, "secondary_tiers, KVTier")


def tier_namespace(config: Any, vllm_config: Any, kv_cache_config: Any, row_bytes: int, weights: str | None) -> bytes:
    """Return a 16-byte digest of everything that decides a row's bytes, apart from vLLM's key of the row.

    *config* is vLLM's `OffloadingConfig`.
    """
    facts = engine_facts(vllm_config, kv_cache_config, weights, WEIGHTS_KEY)
    facts |= {"pool": pool_facts(config), "row_bytes": row_bytes}
    return namespace_of(facts, (), [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups])


def open_tier(
    settings: TierSettings, config: Any, vllm_config: Any, kv_cache_config: Any, pool_rows: memoryview
) -> TierSide:
    """Return the tier below vLLM's host pool, which the caller must close.

    *config* is vLLM's `OffloadingConfig`. *pool_rows* is vLLM's host pool, [num_chunks, row_bytes]. The pool must exist
    until `TierSide.close` has returned.

    Raises:
        UnsupportedEngine: If the engine's weights cannot be determined.
        ValueError: If the disk cannot be used.
    """
    row_bytes = pool_rows.nbytes // len(pool_rows)
    namespace = tier_namespace(config, vllm_config, kv_cache_config, row_bytes, settings.weights)
    pool = pool_rows.cast("B")
    disk = open_disk_below(
        settings,
        namespace,
        lambda group_id: row_bytes,
        [pool],
        num_groups=len(kv_cache_config.kv_cache_groups),
    )
    disk.wait_indexed(INDEXED_WAIT_S)
    # vLLM runs step after step without a pause while a load is in flight. With Python's default switch interval of
    # 5 ms, a thread with an answer of the disk would wait that long for the interpreter's lock.
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
    return TierSide(disk, pool, row_bytes, LONGEST_JOBS * settings.read_timeout_s)
