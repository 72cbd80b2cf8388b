"""`KVTier`: a secondary tier for vLLM's own KV offloading, which stores blocks on disk."""

import logging
from itertools import count
from typing import Any

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

from kvtier.connectors.guard import Guard
from kvtier.connectors.vllm_offloading.known_vllm import (
    check_tier,
    connector_configs,
    end_tokens,
    host_pool,
)
from kvtier.connectors.vllm_offloading.open_tier import (
    open_tier,
    tier_settings,
)
from kvtier.connectors.vllm_offloading.pool_room import HostPool, Verdict
from kvtier.connectors.vllm_offloading.request_chain import RequestChain
from kvtier.connectors.vllm_offloading.row_jobs import EndedRows
from kvtier.connectors.vllm_offloading.tier_counts import DOCUMENTATION, GAUGES, METRIC_PREFIX

log = logging.getLogger(__name__)

RESULTS = {
    Verdict.LOAD: LookupResult.HIT,
    Verdict.WAIT: LookupResult.RETRY,
    Verdict.COMPUTE: LookupResult.MISS,
}


class KVTier(SecondaryTierManager):
    """A secondary tier for vLLM's own KV offloading, which keeps blocks in kvtier's store on disk.

    The constructor raises ValueError for an unsupported configuration of vLLM. No other method raises: after an error,
    the tier finds and stores nothing for a minute, see `Guard`. vLLM's base class documents the methods and when vLLM
    calls them. Lookups do not wait, because the disk's index is in memory. Only vLLM's scheduler calls the methods.
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
        self._num_errors = 0  # errors of the guard that are already in the counts
        self._offers = count()
        self._sees_pool = False

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        return RESULTS[self._guard.run(lambda: self._side.look_up(key, req_context.req_id), Verdict.COMPUTE)]

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
        self._guard.run_always(lambda: self._side.on_request_finished(_chain_of(req_context), req_context.req_id), None)

    def serve_external_requests(self, parent: Any) -> None:
        self._guard.run(lambda: self._see_pool(parent), None)
        self._guard.run(lambda: self._offer_again(parent), None)

    def on_schedule_end(self, context: Any) -> None:
        self._guard.run_always(lambda: self._side.on_step_end(context.new_req_ids), None)

    def drain_jobs(self) -> None:
        self._guard.run_always(self._side.start_new_lineage, None)  # only vLLM's `reset_cache` calls `drain_jobs`
        if not self._guard.run_always(self._side.drain, True):
            log.error(
                "kvtier: the disk did not finish its jobs in time and was closed; restart vLLM to use the disk again"
            )

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

    def _see_pool(self, parent: Any) -> None:
        if not self._sees_pool:
            self._sees_pool = True
            hidden = HostPool(num_available=lambda: 1, touch=lambda keys: None)
            self._side.see_pool(host_pool(parent, ReqContext("kvtier-room")) or hidden)

    def _offer_again(self, parent: Any) -> None:
        """Store blocks that the disk refused earlier, if vLLM still has them in its host pool."""
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
    """Return the request's chain of block keys, after adding the newest keys to it."""
    chain: RequestChain | None = req_context.get_state(RequestChain)
    if chain is None:
        chain = RequestChain()
        req_context.set_state(chain)
    chain.see(end_tokens(req_context))
    return chain
