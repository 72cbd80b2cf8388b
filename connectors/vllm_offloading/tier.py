"""`KVTier`: kvtier's disk as a secondary tier of vLLM's offloading, set up by vLLM's configuration alone."""

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

INDEXED_WAIT_S = 10.0  # for the index of the blocks on disk; the rest is indexed during the first requests
LONGEST_JOBS = 4  # read timeouts until a hung disk has ended all jobs: begun ones, queued ones, times 2 if slow
WEIGHTS_KEY = '"weights" in the configuration of KVTier'
log = logging.getLogger(__name__)


class TierSettings(DiskConfig, frozen=True, kw_only=True):
    """The keys of `[disk]`, and *weights*, which identifies the weights; without it their digest is computed."""

    weights: Annotated[str, msgspec.Meta(min_length=1)] | None = None


def tier_settings(config: Mapping[str, object]) -> TierSettings:
    """Return the settings. Raise ValueError, which names the key, if a setting is unknown or out of range."""
    return tree_from_dict(TierSettings, config, "secondary_tiers, KVTier")


def tier_namespace(config: Any, vllm_config: Any, kv_cache_config: Any, row_bytes: int, weights: str | None) -> bytes:
    """Return 16 bytes for all facts that decide a row's bytes, other than vLLM's key. Arguments as in `open_tier`."""
    facts = engine_facts(vllm_config, kv_cache_config, weights, WEIGHTS_KEY)
    facts |= {"pool": pool_facts(config), "row_bytes": row_bytes}
    return namespace_of(facts, (), [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups])


def open_tier(
    settings: TierSettings, config: Any, vllm_config: Any, kv_cache_config: Any, pool_rows: memoryview
) -> TierSide:
    """Return the tier below vLLM's host pool, which the caller must close.

    *config* is vLLM's `OffloadingConfig`. *pool_rows* is its host pool, [num_chunks, row_bytes], which is not used any
    more after `TierSide.close`.

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
    # vLLM steps without a pause while a load is in flight. With Python's default of 5 ms, each answer of the disk waits
    # that long for the interpreter's lock.
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
    return TierSide(disk, pool, row_bytes, LONGEST_JOBS * settings.read_timeout_s)


class KVTier(SecondaryTierManager):
    """A secondary tier that keeps vLLM's blocks in kvtier's store.

    Construction raises ValueError for an engine that cannot be served. After that no hook raises, see `Guard`.
    vLLM's base class documents the hooks and when vLLM calls them. The index of the disk is in memory, so each lookup
    is answered at once. Owned by vLLM's scheduler.
    """

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
        self._num_errors = 0  # errors of the guard that were counted
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
        self._guard.run_always(self._side.start_new_lineage, None)  # only vLLM's `reset_cache` calls `drain_jobs`
        if not self._guard.run_always(self._side.drain, True):
            log.error("kvtier: the disk did not finish its jobs in time and was closed; restart vLLM to use it again")

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
        """Store blocks that the disk refused when vLLM offered them, if vLLM still has them in host memory."""
        holes = self._side.take_unstored()
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
    """Return the chain of the request, which is kept in its context and grows."""
    chain: RequestChain | None = req_context.get_state(RequestChain)
    if chain is None:
        chain = RequestChain()
        req_context.set_state(chain)
    chain.see(end_tokens(req_context))
    return chain
