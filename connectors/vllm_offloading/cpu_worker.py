"""`CpuOffloadingWorker`: copies blocks between vLLM's KV cache and its host pool, for vLLM on a CPU."""

from functools import partial
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvtier.connectors.vllm_connector.engine_layout import UnsupportedEngine
from kvtier.connectors.vllm_offloading.copy_thread import CopyThread
from kvtier.connectors.vllm_offloading.page_copies import Ids, Layer, PageCopies, PageIds, Tensor


class CpuOffloadingWorker(OffloadingWorker):
    """A copier of blocks between vLLM's KV cache and its host pool, both of which are in CPU memory.

    One thread runs the stores and another the loads, so that a load does not wait for stores. Only vLLM's worker calls
    the methods. A job fails only if vLLM passes wrong ids. The contents of the job's blocks are then undefined, so vLLM
    stops.
    """

    def __init__(self, kv_caches: Any, pages_per_chunk: int, region: Any) -> None:
        """Start the threads. Raise `UnsupportedEngine` if the KV cache is not in a CPU's memory.

        *kv_caches* is vLLM's `CanonicalKVCaches`. *region* is the host pool, a `SharedOffloadRegion` of vLLM mapped for
        this rank. If this constructor succeeds, the worker owns *region*, and `shutdown` cleans it up.
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
    """Return the tensor of a `CanonicalKVCacheTensor` of vLLM, together with its part of the host pool."""
    if cache.tensor.device.type != "cpu" or cache.tensor.dtype != torch.int8:
        raise UnsupportedEngine(
            "CpuTieringOffloadingSpec supports only KV cache tensors of int8 in CPU memory, not of "
            f"{cache.tensor.dtype} on {cache.tensor.device}; "
            'use "spec_name":"TieringOffloadingSpec" without "spec_module_path"'
        )
    chunks = region.create_next_worker_view(cache.page_size_bytes * pages_per_chunk)
    return Tensor(cache.tensor, chunks.view(len(chunks), pages_per_chunk, cache.page_size_bytes))
