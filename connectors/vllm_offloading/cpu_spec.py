"""`CpuTieringOffloadingSpec`: tiered KV offloading for vLLM on a CPU, which vLLM itself does not support."""

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.connectors.vllm_offloading.cpu_worker import CpuOffloadingWorker
from kvtier.connectors.vllm_offloading.known_vllm import check_cpu_spec


class CpuTieringOffloadingSpec(TieringOffloadingSpec):
    """vLLM's specification of tiered offloading, changed to copy blocks with `CpuOffloadingWorker`.

    The constructor raises `UnsupportedEngine` for a configuration that the worker does not support.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_cpu_spec(self, SharedOffloadRegion, current_platform.device_type)
        self._copying: CpuOffloadingWorker | None = None

    def get_worker(self, kv_caches: Any) -> CpuOffloadingWorker:
        self._copying = self._copying or self.create_worker(kv_caches)
        return self._copying

    def create_worker(self, kv_caches: Any) -> CpuOffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            return CpuOffloadingWorker(kv_caches, self.blocks_per_chunk, region)
        except BaseException:
            region.cleanup()
            raise
