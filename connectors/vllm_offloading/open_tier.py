"""Opens what is below `KVTier`: the disk, for this engine's blocks and no other's."""

import sys
from typing import Any

from kvtier.connectors.disk_below.open import open_disk_below
from kvtier.connectors.vllm_connector.engine_facts import engine_facts
from kvtier.connectors.vllm_connector.engine_layout import namespace_of
from kvtier.connectors.vllm_offloading.known_vllm import pool_facts
from kvtier.connectors.vllm_offloading.tier_settings import TierSettings
from kvtier.connectors.vllm_offloading.tier_side import TierSide
from kvtier.store.process.store_process import SWITCH_INTERVAL_S

INDEXED_WAIT_S = 10.0  # for what was on disk at the start to be known; the rest is found beside the first requests
LONGEST_JOBS = 4  # of a disk that hangs: what it had begun, what waited, and twice as much for a slow machine
WEIGHTS_KEY = '"weights" in the configuration of KVTier'


def tier_namespace(config: Any, vllm_config: Any, kv_cache_config: Any, row_bytes: int, weights: str | None) -> bytes:
    """Return 16 bytes for all that decides the bytes of a row besides vLLM's key. Arguments as in `open_tier`."""
    facts = engine_facts(vllm_config, kv_cache_config, weights, WEIGHTS_KEY)
    facts |= {"pool": pool_facts(config), "row_bytes": row_bytes}
    return namespace_of(facts, (), [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups])


def open_tier(
    settings: TierSettings, config: Any, vllm_config: Any, kv_cache_config: Any, pool_rows: memoryview
) -> TierSide:
    """The tier below vLLM's host pool; its caller closes it. *config*: vLLM's `OffloadingConfig`. *pool_rows*: its host
    pool, [num_chunks, row_bytes], left alone after `TierSide.close`.

    `NotServed` if nothing says which weights the engine has; ValueError for a disk that cannot be used.
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
    # vLLM steps without a pause while a load is under way: with Python's 5 ms each answer of the disk waits for it.
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
    return TierSide(disk, pool, row_bytes, LONGEST_JOBS * settings.read_timeout_s)
