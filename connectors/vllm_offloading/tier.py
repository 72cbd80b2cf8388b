"""KVTier: kvtier's disk as a secondary tier of vLLM's offloading, by vLLM's configuration alone."""

import logging
import sys
from collections.abc import Mapping
from itertools import count
from typing import Annotated, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvtier.connectors.disk_below.open import open_disk_below
from kvtier.connectors.guard import Guard
from kvtier.connectors.vllm_connector.engine_facts import engine_facts
from kvtier.connectors.vllm_connector.engine_layout import namespace_of
from kvtier.connectors.vllm_offloading.known_vllm import check_tier, connector_configs, end_tokens, pool_facts
from kvtier.connectors.vllm_offloading.request_chain import RequestChain
from kvtier.connectors.vllm_offloading.row_jobs import EndedRows
from kvtier.connectors.vllm_offloading.tier_counts import DOCUMENTATION, GAUGES, METRIC_PREFIX
from kvtier.connectors.vllm_offloading.tier_side import TierSide
from kvtier.engine.config import DiskConfig, tree_from_dict
from kvtier.store.process.store_process import SWITCH_INTERVAL_S

INDEXED_WAIT_S = 10.0  # for what was on disk at the start to be known; the rest is found beside the first requests
LONGEST_JOBS = 4  # of a disk that hangs: what it had begun, what waited, and twice as much for a slow machine
WEIGHTS_KEY = '"weights" in the configuration of KVTier'
log = logging.getLogger(__name__)


class TierSettings(DiskConfig, frozen=True, kw_only=True):
    """The keys of `[disk]`, and *weights*: what stands for the model's weights, whose digest is taken otherwise."""

    weights: Annotated[str, msgspec.Meta(min_length=1)] | None = None


def tier_settings(config: Mapping[str, object]) -> TierSettings:
    """The settings. ValueError, with the key, for what they may not say."""
    return tree_from_dict(TierSettings, config, "secondary_tiers, KVTier")


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


class KVTier(SecondaryTierManager):
    """vLLM's blocks in kvtier's store. Raises ValueError at the start, for what cannot be served; after that no hook
    raises, see `Guard`. What hooks are for and when they are called vLLM's base class says. Whether a block is on disk
    is known in memory, so each look-up has its answer at once. Owned by vLLM's scheduler."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **config: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = tier_settings(config)
        vllm_config, kv_cache_config = connector_configs()
        check_tier(SecondaryTierManager, vllm_config)
        self._side = open_tier(settings, offloading_spec.config, vllm_config, kv_cache_config, primary_kv_view)
        self._guard = Guard(lambda: None)
        self._num_errors = 0  # that were counted
        self._offers = count()

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        is_held = self._guard.run(lambda: self._side.holds(key), False)
        return LookupResult.HIT if is_held else LookupResult.MISS

    def submit_load(self, job_metadata: Any) -> None:
        job, keys = job_metadata, list(job_metadata.keys)

        def load() -> bool:
            self._side.load(job.job_id, keys, job.chunk_ids)
            return True

        if not self._guard.run_always(load, False):
            self._side.fail(job.job_id, keys, is_load=True)

    def submit_store(self, job_metadata: Any) -> None:
        job, keys = job_metadata, list(job_metadata.keys)

        def store() -> bool:
            chain = _chain_of(job.req_context)
            parents = {key: chain.parent(key) for key in keys}
            self._side.store(job.job_id, keys, job.chunk_ids, parents, end_tokens(job.req_context))
            return True

        if not self._guard.run(store, False):
            self._side.fail(job.job_id, keys, is_load=False)

    def get_finished_jobs(self) -> list[Any]:
        return [self._result(job) for job in self._guard.run_always(self._side.take_ended, [])]

    def on_request_finished(self, req_context: Any) -> None:
        self._guard.run(lambda: self._side.on_request_finished(_chain_of(req_context)), None)

    def serve_external_requests(self, parent: Any) -> None:
        self._guard.run(lambda: self._offer_again(parent), None)

    def drain_jobs(self) -> None:
        self._guard.run_always(self._side.begin_anew, None)  # vLLM's `reset_cache` alone calls this
        if not self._guard.run_always(self._side.drain, True):
            log.error("kvtier: the disk has not ended what it began, and is closed; restart vLLM to have it again")

    def shutdown(self) -> None:
        self._guard.run_always(self._side.close, None)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        counters = {f"{METRIC_PREFIX}{name}": OffloadingCounterMetadata(text) for name, text in DOCUMENTATION.items()}
        gauges = {f"{METRIC_PREFIX}{name}": OffloadingGaugeMetadata(text) for name, text in GAUGES.items()}
        return counters | gauges

    def get_stats(self) -> Any:
        stats, counts = OffloadingConnectorStats(), self._side.counts
        counts.errors += self._guard.num_errors - self._num_errors
        self._num_errors = self._guard.num_errors
        for name, number in counts.take().items():
            stats.increase_counter(f"{METRIC_PREFIX}{name}", number)
        for name, number in self._guard.run(self._side.gauges, {}).items():
            stats.set_gauge(f"{METRIC_PREFIX}{name}", number)
        return stats

    def _result(self, job: EndedRows) -> Any:
        num_bytes = len(job.good) * self.block_size_bytes
        is_good = len(job.good) == len(job.keys)
        return JobResult(job.job_id, is_good, job.good if job.is_load else None, job.took_s, num_bytes)

    def _offer_again(self, parent: Any) -> None:
        """Store what the disk did not take when vLLM offered it, as far as vLLM has it in host memory still."""
        holes = self._side.take_holes()
        if not holes:
            return
        context = ReqContext(f"kvtier-{next(self._offers)}")
        parent.on_new_request(context)
        found = {key: parent.lookup(key, context) for key in holes}
        self._side.put_back(
            {key: holes[key] for key in found if found[key] not in (LookupResult.HIT, LookupResult.MISS)}
        )
        keys = [key for key in found if found[key] is LookupResult.HIT]
        if keys:
            job = parent.create_store_job(keys, context)
            self._side.counts.offered_again_blocks += len(keys)
            self._side.store(job.job_id, keys, job.chunk_ids, holes, {})
        parent.on_request_finished(context)


def _chain_of(req_context: Any) -> RequestChain:
    """The chain of the request, which is kept with it and grows."""
    chain: RequestChain | None = req_context.get_state(RequestChain)
    if chain is None:
        chain = RequestChain()
        req_context.set_state(chain)
    chain.see(end_tokens(req_context))
    return chain
