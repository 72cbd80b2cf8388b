"""`KVTierConnector`: the KV connector class that vLLM instantiates in its scheduler and in each worker."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.connectors.guard import Guard
from kvtier.connectors.vllm_connector.build_scheduler_half import build_scheduler_half, settings_of
from kvtier.connectors.vllm_connector.connector_metrics import ConnectorMetrics, ConnectorStats
from kvtier.connectors.vllm_connector.drafters import depends_on_next
from kvtier.connectors.vllm_connector.engine_layout import group_layouts
from kvtier.connectors.vllm_connector.known_vllm import check_engine
from kvtier.connectors.vllm_connector.late_stores import LateStores
from kvtier.connectors.vllm_connector.mapped_segment import MappedSegment
from kvtier.connectors.vllm_connector.scheduler_half import SchedulerHalf
from kvtier.connectors.vllm_connector.step_work import StepWork, WorkerReport
from kvtier.connectors.vllm_connector.vllm_request import overwritten_pages, state_pages
from kvtier.connectors.vllm_connector.worker_side import WorkerSide
from kvtier.engine.attached.link import SidecarStanding
from kvtier.tiers.naming.tier import Tier

KVConnectorMetadata.register(StepWork)
KVConnectorWorkerMetadata.register(WorkerReport)
with suppress(ValueError):  # it is registered already
    # vLLM's `MultiConnector` looks up a connector's statistics by the name of its class.
    KVConnectorFactory.register_connector("KVTierConnector", "kvtier.connectors.vllm", "KVTierConnector")

NOTHING_TO_DO = StepWork(0)
SOURCES = {  # vLLM has no name for a remote tier
    Tier.HOST: CacheHitSource.HOST,
    Tier.DISK: CacheHitSource.DISK,
    Tier.REMOTE: CacheHitSource.EXTERNAL_UNSPECIFIED,
}


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """A vLLM KV connector that keeps blocks in the host memory and on the disk of a sidecar process.

    The constructor raises ValueError for an unsupported configuration of vLLM. `register_kv_caches` raises ValueError
    for KV caches that cannot be copied. No other method raises: after an error, the connector finds and stores nothing
    for a minute, see `Guard`. vLLM's base class documents the methods and when vLLM calls them.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = settings_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_engine(KVConnectorBase_V1, vllm_config, kv_cache_config)
        num_ranks = vllm_config.parallel_config.tensor_parallel_size
        layouts = group_layouts(kv_cache_config, num_ranks, depends_on_next(vllm_config))
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = build_scheduler_half(vllm_config, kv_cache_config, layouts, settings)
            self._guard = self._scheduler.guard
        else:
            self._guard = Guard(lambda: None)
            segment = MappedSegment([layout.block_bytes for layout in layouts])
            self._worker = WorkerSide(layouts, get_tensor_model_parallel_rank(), segment, LateStores())
        self._work = NOTHING_TO_DO

    @property
    def requires_kv_delivery(self) -> bool:
        """False, because a block that is not stored only causes a cache miss later."""
        return False

    # In the scheduler.

    def standing(self) -> SidecarStanding:
        """Return the current state of the connection to the sidecar."""
        return self._half.standing()

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a scheduler hook was called in a worker"
        return self._scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        half = self._half
        num_matched = self._guard.run(lambda: half.num_matched(request, num_computed_tokens), 0)
        return num_matched, bool(num_matched) and half.side.loads_ahead

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        side = self._half.side

        def plan() -> bool:
            side.on_allocated(request, blocks.get_block_ids(), num_external_tokens)
            return True

        if not self._guard.run_always(plan, False) and num_external_tokens:
            self._guard.run_always(lambda: side.on_plan_failed(request.request_id, blocks.get_block_ids()), None)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        side = self._half.side
        by_tier = self._guard.run(
            lambda: side.tokens_by_tier(request, num_external_tokens), {Tier.HOST: num_external_tokens}
        )
        return {SOURCES[tier]: num_tokens for tier, num_tokens in by_tier.items() if num_tokens}

    def build_connector_meta(self, scheduler_output: Any) -> StepWork:
        half, state = self._half, scheduler_output.kv_connector_block_state
        work = self._guard.run_always(
            lambda: half.step(
                scheduler_output.num_scheduled_tokens,
                state.get_block_ids,
                overwritten_pages(scheduler_output),
                state_pages(scheduler_output),
            ),
            None,
        )
        return work or self._guard.run_always(half.side.salvaged, NOTHING_TO_DO)

    def update_connector_output(self, connector_output: Any) -> None:
        half, report = self._half, connector_output.kv_connector_worker_meta
        self._guard.run_always(lambda: half.on_output(report, connector_output.invalid_block_ids), None)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        side = self._half.side
        self._guard.run_always(lambda: side.on_finished(request), None)
        return False, None

    def reset_cache(self) -> bool | None:
        return self._guard.run_always(self._half.reset, False)

    # In each worker.

    @property
    def _rank(self) -> WorkerSide:
        assert self._worker is not None, "a worker hook was called in the scheduler"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._rank.register(kv_caches, self._kv_cache_config.num_blocks)  # without the guard, so that it can raise

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Store the blocks of the previous step that cannot wait until after this step's forward pass.

        vLLM calls this hook first in a step, before it writes to any page.
        """
        rank, work = self._rank, kv_connector_metadata
        assert isinstance(work, StepWork), "vLLM passes on the metadata that build_connector_meta returned"
        if work.stores or work.ends_late_stores:
            self._guard.run_always(lambda: rank.store(work), None)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        rank, work = self._rank, connector_metadata
        assert isinstance(work, StepWork), "vLLM passes on the metadata that build_connector_meta returned"
        self._work = work
        self._guard.run_always(lambda: rank.begin(work), None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        rank, work = self._rank, self._work
        if work.loads or work.unloadable_pages:
            self._guard.run_always(lambda: rank.load(work), None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because all loads end before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing, because the blocks of this step are stored after it."""

    def wait_for_save(self) -> None:
        """Start to store, on a thread, the blocks that `handle_preemptions` did not store. Do not wait for it."""
        self._guard.run_always(self._rank.store_late, None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        rank, work = self._rank, self._work
        ended, failed = self._guard.run_always(lambda: rank.ended_loads(work), (set[str](), set[str]()))
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._rank.pop_failed_pages()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        rank, work = self._rank, self._work
        report = self._guard.run_always(lambda: rank.report(work), WorkerReport(work.number, None))
        self._work = NOTHING_TO_DO
        return report

    # In the scheduler and in each worker.

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        if self._scheduler is None:
            return None
        counts = self._guard.run_always(self._scheduler.side.counts.take, dict[str, int]())
        return ConnectorStats(counts) if any(counts.values()) else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats | None:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> ConnectorMetrics:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return False, because the worker keeps views of the KV caches, which vLLM frees when it sleeps.

        vLLM calls this method from 0.33 on.
        """
        return False

    def take_events(self) -> Iterable[Any]:
        return ()

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._guard.run_always(self._worker.close, None)
