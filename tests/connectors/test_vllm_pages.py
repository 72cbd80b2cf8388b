"""vLLM's tensors as pages: whole blocks of opaque bytes, in every layout that has them in one run."""

import numpy as np
import pytest
import torch

from kvtier.connectors.vllm_connector.engine_layout import GroupLayout, UnsupportedEngine
from kvtier.connectors.vllm_connector.pages import DevicePages, Pages, group_pages
from kvtier.tiers.naming.groups import FullAttention, RecurrentState

NUM_PAGES, HEADS, TOKENS, SIZE = 6, 2, 4, 8
PAGE_BYTES = HEADS * TOKENS * 2 * SIZE * 2
DEVICES = [
    "cpu",
    "cpu as a device",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")]),
]


def layout(num_ranks: int = 1, page_bytes: int = PAGE_BYTES) -> GroupLayout:
    return GroupLayout(FullAttention(TOKENS), ("a", "b"), (page_bytes, page_bytes), num_ranks)


def caches(device: str) -> dict[str, torch.Tensor]:
    """Two layers in one allocation, as vLLM has them."""
    raw = torch.arange(2 * NUM_PAGES * PAGE_BYTES, dtype=torch.int64).to(torch.uint8).to(device.split(maxsplit=1)[0])
    both = raw.view(torch.bfloat16).view(2, NUM_PAGES, HEADS, TOKENS, 2 * SIZE)
    return {"a": both[0], "b": both[1]}


def pages_on(device: str, num_ranks: int = 1, rank: int = 0) -> tuple[Pages, dict[str, torch.Tensor]]:
    tensors = caches(device)
    if device != "cpu as a device":
        return group_pages(layout(num_ranks), tensors, NUM_PAGES, rank), tensors
    with pytest.MonkeyPatch.context() as patch:  # what is done on a device can be done here too
        patch.setattr("kvtier.connectors.vllm_connector.pages.CpuPages", DevicePages)
        return group_pages(layout(num_ranks), tensors, NUM_PAGES, rank), tensors


def bytes_of(tensor: torch.Tensor, page: int) -> bytes:
    return tensor[page].contiguous().cpu().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_that_is_stored_and_loaded_elsewhere_has_the_same_bytes(device: str) -> None:
    pages, tensors = pages_on(device)
    host = np.zeros((5, 2 * PAGE_BYTES), np.uint8)
    before = {name: [bytes_of(tensor, page) for page in range(NUM_PAGES)] for name, tensor in tensors.items()}

    pages.store([4, 1], [3, 0], host)
    pages.load([2, 5], [3, 0], host)

    assert host[3].tobytes() == before["a"][4] + before["b"][4]
    for name, tensor in tensors.items():
        assert [bytes_of(tensor, 2), bytes_of(tensor, 5)] == [before[name][4], before[name][1]]
        assert [bytes_of(tensor, page) for page in (0, 1, 3, 4)] == [before[name][page] for page in (0, 1, 3, 4)]
    assert not host[[1, 2, 4]].any()


@pytest.mark.parametrize("device", DEVICES)
def test_each_rank_has_its_own_part_of_a_slot(device: str) -> None:
    host = np.zeros((2, 4 * PAGE_BYTES), np.uint8)
    pages, tensors = pages_on(device, num_ranks=2, rank=1)

    pages.store([3], [1], host)

    assert not host[1, : 2 * PAGE_BYTES].any()
    assert host[1, 2 * PAGE_BYTES :].tobytes() == bytes_of(tensors["a"], 3) + bytes_of(tensors["b"], 3)


def test_a_block_may_be_several_of_the_kernels_blocks() -> None:
    raw = torch.zeros(2, 2 * NUM_PAGES, HEADS, TOKENS // 2, 2 * SIZE, dtype=torch.bfloat16)
    tensors = {"a": raw[0], "b": raw[1]}
    raw[0, 6:8] = 1
    host = np.zeros((1, 2 * PAGE_BYTES), np.uint8)

    group_pages(layout(), tensors, NUM_PAGES, 0).store([3], [0], host)

    assert host[0, :PAGE_BYTES].view(np.uint16).all()
    assert not host[0, PAGE_BYTES:].any()


def test_layers_may_lie_beside_each_other_in_each_block() -> None:
    raw = torch.zeros(NUM_PAGES, 2, HEADS, TOKENS, 2 * SIZE, dtype=torch.bfloat16)
    tensors = {"a": raw[:, 0], "b": raw[:, 1]}
    raw[3, 1] = 1
    host = np.zeros((1, 2 * PAGE_BYTES), np.uint8)

    group_pages(layout(), tensors, NUM_PAGES, 0).store([3], [0], host)

    assert not host[0, :PAGE_BYTES].any()
    assert host[0, PAGE_BYTES:].view(np.uint16).all()


def test_a_recurrent_state_is_copied_without_what_pads_its_page() -> None:
    num_bytes, padded = 40, 64
    raw = torch.ones(NUM_PAGES * padded, dtype=torch.int8)
    states = torch.as_strided(raw, (NUM_PAGES, 1, 1, num_bytes), (padded, num_bytes, num_bytes, 1))
    states[3] = 2
    host = np.zeros((1, num_bytes), np.uint8)
    pages = group_pages(GroupLayout(RecurrentState(TOKENS), ("a",), (num_bytes,), 1), {"a": states}, NUM_PAGES, 0)

    pages.store([3], [0], host)
    pages.load([1], [0], host)

    assert (host[0] == 2).all()
    assert (raw.view(NUM_PAGES, padded)[1] == torch.tensor([2] * num_bytes + [1] * (padded - num_bytes))).all()


def test_heads_and_tokens_may_come_in_any_order_inside_a_block() -> None:
    raw = torch.zeros(2, NUM_PAGES, TOKENS, HEADS, 2 * SIZE, dtype=torch.bfloat16).transpose(2, 3)

    group_pages(layout(), {"a": raw[0], "b": raw[1]}, NUM_PAGES, 0)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"a": torch.zeros(NUM_PAGES, 4)}, "layer a has"),
        ({"a": torch.zeros(NUM_PAGES + 1, PAGE_BYTES // 4)}, "7 rows, which is not a multiple of its 6 blocks"),
        ({"a": torch.zeros(PAGE_BYTES // 4, NUM_PAGES).T}, "not contiguous"),
        ({"a": [torch.zeros(1)]}, "not a single tensor"),
    ],
)
def test_what_cannot_be_copied_as_whole_blocks_is_refused(tensors: dict[str, torch.Tensor], why: str) -> None:
    with pytest.raises(UnsupportedEngine, match=why):
        group_pages(layout(), tensors, NUM_PAGES, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_page_or_slot_that_there_is_not_raises(device: str) -> None:
    if device == "cuda":
        pytest.skip("a device asserts, and is of no use then")
    pages, _ = pages_on(device)
    host = np.zeros((1, 2 * PAGE_BYTES), np.uint8)

    with pytest.raises(IndexError):
        pages.load([NUM_PAGES], [0], host)
    with pytest.raises(IndexError):
        pages.store([0], [1], host)
