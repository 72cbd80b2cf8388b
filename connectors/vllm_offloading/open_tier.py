"""`open_tier`: opens the disk tier with the settings of `KVTier`. This module does not use vLLM's classes."""

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
# All jobs end within this many read timeouts, even if the disk hangs: one for running jobs and one for queued jobs,
# doubled for slow machines.
LONGEST_JOBS = 4
WEIGHTS_KEY = '"weights" in the configuration of KVTier'


class TierSettings(DiskConfig, frozen=True, kw_only=True):
    """The settings of `KVTier`: the keys of kvtier's `[disk]` table, and *weights*.

    *weights* is a name that identifies the model's weights. If it is None, a digest of the weights is computed.
    """

    weights: Annotated[str, msgspec.Meta(min_length=1)] | None = None


def tier_settings(config: Mapping[str, object]) -> TierSettings:
    """Return checked settings. Raise ValueError, which names the key, if a setting is unknown or out of range."""
    return tree_from_dict(TierSettings, config, "secondary_tiers, KVTier")


def tier_namespace(config: Any, vllm_config: Any, kv_cache_config: Any, row_bytes: int, weights: str | None) -> bytes:
    """Return the namespace of the blocks: a digest of everything that determines their bytes, except vLLM's keys.

    The digest has 16 bytes. *config* is vLLM's `OffloadingConfig`. *weights* is as in `TierSettings`.
    """
    facts = engine_facts(vllm_config, kv_cache_config, weights, WEIGHTS_KEY)
    facts |= {"pool": pool_facts(config), "row_bytes": row_bytes}
    return namespace_of(facts, (), [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups])


def open_tier(
    settings: TierSettings, config: Any, vllm_config: Any, kv_cache_config: Any, pool_rows: memoryview
) -> TierSide:
    """Open the disk tier below vLLM's host pool. The caller must close it.

    *config* is vLLM's `OffloadingConfig`. *pool_rows* is vLLM's host pool, [num_chunks, row_bytes]. Its memory must
    stay valid until `TierSide.close` has returned.

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
    # vLLM runs step after step without a pause while a load is in flight. With Python's default switch interval, a
    # thread that has an answer from the disk would wait 5 ms for the interpreter's lock.
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
    return TierSide(disk, pool, row_bytes, LONGEST_JOBS * settings.read_timeout_s)
