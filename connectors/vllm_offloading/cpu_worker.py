"""`CpuOffloadingWorker`: the copies between vLLM's KV cache and its host pool if both are in a CPU's memory."""

from functools import partial
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvtier.connectors.vllm_connector.engine_layout import UnsupportedEngine
from kvtier.connectors.vllm_offloading.copy_thread import CopyThread
from kvtier.connectors.vllm_offloading.page_copies import Ids, Layer, PageCopies, PageIds, Tensor


class CpuOffloadingWorker(OffloadingWorker):
    """A worker with one thread for stores and one for loads, so that a load does not wait for stores.

    Owned by vLLM's worker. A job fails only if vLLM passes ids that do not exist. vLLM then ends, because the bytes of
    the job's blocks are unknown.
    """

    def __init__(self, kv_caches: Any, pages_per_chunk: int, region: Any) -> None:
        """Start the threads. Raise `UnsupportedEngine` if the KV cache is not in a CPU's memory.

        *kv_caches* is vLLM's `CanonicalKVCaches`. *region* is vLLM's `SharedOffloadRegion`, mapped for this rank. If
        this constructor succeeds, the worker owns *region*, and `shutdown` cleans it up.
        """
        self._region = region
        tensors = [_tensor(each, pages_per_chunk, region) for each in kv_caches.tensors]
        groups = [[Layer(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in kv_caches.group_data_refs]
        self._copies: PageCopies | None = PageCopies(tensors, groups)
        self._stores = CopyThread("kvtier-offload-store")
        self._loads = CopyThread("kvtier-offload-load")

    def submit_store(self, job_id: int, src_spec: PageIds, dst_spec: Ids) -> bool:
        assert self._copies is not None, "a store was submitted after shutdown"
        self._stores.submit(job_id, partial(self._copies.store, src_spec, dst_spec))
        return True

    def submit_load(self, job_id: int, src_spec: Ids, dst_spec: PageIds, expedited: bool = False) -> bool:
        """Begin a load. *expedited*, which vLLM 0.33 sets for some loads, is ignored: all loads run in order."""
        assert self._copies is not None, "a load was submitted after shutdown"
        self._loads.submit(job_id, partial(self._copies.load, dst_spec, src_spec))
        return True

    def get_finished(self) -> list[Any]:
        ended = [*self._stores.take_ended(), *self._loads.take_ended()]
        return [TransferResult(job.job_id, job.num_bytes is not None, job.num_bytes, job.took_s) for job in ended]

    def wait(self, job_ids: set[int]) -> None:
        self._stores.wait(job_ids)
        self._loads.wait(job_ids)

    def shutdown(self) -> None:
        if self._copies is None:
            return
        self._stores.close()
        self._loads.close()
        self._copies = None  # the region cannot be unmapped while a tensor uses its memory
        self._region.cleanup()


def _tensor(cache: Any, pages_per_chunk: int, region: Any) -> Tensor:
    """Return the tensor of *cache*, vLLM's `CanonicalKVCacheTensor`, together with its part of the host pool."""
    if cache.tensor.device.type != "cpu" or cache.tensor.dtype != torch.int8:
        raise UnsupportedEngine(
            f"kvtier copies only KV caches of int8 in a CPU's memory, not of {cache.tensor.dtype} on "
            f"{cache.tensor.device}, which vLLM copies itself; "
            'use "spec_name":"TieringOffloadingSpec" without "spec_module_path"'
        )
    chunks = region.create_next_worker_view(cache.page_size_bytes * pages_per_chunk)
    return Tensor(cache.tensor, chunks.view(len(chunks), pages_per_chunk, cache.page_size_bytes))
