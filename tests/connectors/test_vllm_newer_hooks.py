"""What vLLM 0.33 asks of our classes and 0.32 does not, by the classes that they derive from."""

from types import SimpleNamespace

import pytest
import torch
from vllm_bases import KVConnectorBase, KVConnectorFactory, OffloadingWorker, imported_with_vllm

CONNECTORS = "kvtier.connectors"
NUM_PAGES, PAGE_BYTES = 6, 16


class Region:
    """A host pool of as many chunks as there are pages, one page each."""

    def __init__(self) -> None:
        self.chunks = torch.zeros((NUM_PAGES, PAGE_BYTES), dtype=torch.int8)
        self.is_over = False

    def create_next_worker_view(self, num_bytes: int) -> torch.Tensor:
        assert num_bytes == PAGE_BYTES
        return self.chunks

    def cleanup(self) -> None:
        self.is_over = True


@pytest.mark.parametrize("expedited", [{}, {"expedited": True}, {"expedited": False}])
def test_a_load_that_is_to_be_expedited_brings_its_pages(
    monkeypatch: pytest.MonkeyPatch, expedited: dict[str, bool]
) -> None:
    module = imported_with_vllm(monkeypatch, f"{CONNECTORS}.vllm_offloading.cpu_worker")
    pages = torch.arange(NUM_PAGES * PAGE_BYTES, dtype=torch.int8).reshape(NUM_PAGES, PAGE_BYTES)
    expected, region = pages.clone(), Region()
    caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=pages, page_size_bytes=PAGE_BYTES)],
        group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=PAGE_BYTES)]],
    )
    worker: OffloadingWorker = module.CpuOffloadingWorker(caches, 1, region)
    stored = SimpleNamespace(block_ids=[1, 2], group_sizes=[2], block_indices=[0])
    loaded = SimpleNamespace(block_ids=[5, 4], group_sizes=[2], block_indices=[0])

    assert worker.submit_store(1, stored, SimpleNamespace(block_ids=[3, 0]))
    worker.wait({1})
    assert worker.submit_load(2, SimpleNamespace(block_ids=[3, 0]), loaded, **expedited)
    worker.wait({2})

    ended = {result.job_id: (result.success, result.transfer_size) for result in worker.get_finished()}
    assert ended == {1: (True, 2 * PAGE_BYTES), 2: (True, 2 * PAGE_BYTES)}
    assert torch.equal(pages[[5, 4]], expected[[1, 2]])
    module.CpuOffloadingWorker.shutdown(worker)
    assert region.is_over


def test_the_connector_says_that_it_does_not_survive_vllms_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = imported_with_vllm(monkeypatch, f"{CONNECTORS}.vllm_connector.connector").KVTierConnector

    assert issubclass(connector, KVConnectorBase)
    assert KVConnectorBase.supports_sleep_mode({}) is True
    assert connector.supports_sleep_mode({}) is False


def test_vllms_multi_connector_finds_the_connector_by_the_name_of_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "registered", {})
    for _ in range(2):
        imported_with_vllm(monkeypatch, f"{CONNECTORS}.vllm_connector.connector")

    assert KVConnectorFactory.registered == {"KVTierConnector": ("kvtier.connectors.vllm", "KVTierConnector")}
