"""CpuOffloadingWorker: vLLM's copies between its KV cache and its host pool where both are in a CPU's memory."""

from functools import partial
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvtier.connectors.vllm_connector.engine_layout import NotServed
from kvtier.connectors.vllm_offloading.copy_thread import CopyThread
from kvtier.connectors.vllm_offloading.page_copies import Ids, Layer, PageCopies, PageIds, Tensor


class CpuOffloadingWorker(OffloadingWorker):
    """Stores and loads have a thread each, so that a load does not wait for stores. Owned by vLLM's worker; it owns the
    *region* once its constructor has returned. A job that fails is told as failed, upon which vLLM ends: which bytes
    its blocks have is not known. None can, unless vLLM gives ids that there are not."""

    def __init__(self, kv_caches: Any, pages_per_chunk: int, region: Any) -> None:
        """*kv_caches*: vLLM's `CanonicalKVCaches`. *region*: its `SharedOffloadRegion`, mapped for this rank.
        `NotServed` for a KV cache that is not in a CPU's memory."""
        self._region = region
        tensors = [_tensor(each, pages_per_chunk, region) for each in kv_caches.tensors]
        groups = [[Layer(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in kv_caches.group_data_refs]
        self._copies: PageCopies | None = PageCopies(tensors, groups)
        self._stores = CopyThread("kvtier-offload-store")
        self._loads = CopyThread("kvtier-offload-load")

    def submit_store(self, job_id: int, src_spec: PageIds, dst_spec: Ids) -> bool:
        assert self._copies is not None, "vLLM stores after its shutdown"
        self._stores.submit(job_id, partial(self._copies.store, src_spec, dst_spec))
        return True

    def submit_load(self, job_id: int, src_spec: Ids, dst_spec: PageIds, expedited: bool = False) -> bool:
        """Begin a load. vLLM 0.33 asks for some loads to be *expedited*; all of them are done in order."""
        assert self._copies is not None, "vLLM loads after its shutdown"
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
        self._copies = None  # the region cannot be unmapped while an array is over it
        self._region.cleanup()


def _tensor(cache: Any, pages_per_chunk: int, region: Any) -> Tensor:
    """*cache*: vLLM's `CanonicalKVCacheTensor`."""
    if cache.tensor.device.type != "cpu" or cache.tensor.dtype != torch.int8:
        raise NotServed(
            f"a KV cache of {cache.tensor.dtype} on {cache.tensor.device} is not in a CPU's memory, byte by byte; "
            'vLLM copies it itself: use "spec_name":"TieringOffloadingSpec" without "spec_module_path"'
        )
    chunks = region.create_next_worker_view(cache.page_size_bytes * pages_per_chunk)
    return Tensor(cache.tensor, chunks.view(len(chunks), pages_per_chunk, cache.page_size_bytes))
