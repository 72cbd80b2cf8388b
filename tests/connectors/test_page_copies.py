"""The copies between vLLM's KV cache and its host pool on a CPU: each page to its place, also inside of a chunk."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kvtier.connectors.vllm_offloading.page_copies import Layer, PageCopies, Tensor

NUM_PAGES, NUM_CHUNKS, PAGE_BYTES, PAD = 10, 5, 16, 3


@dataclass
class Pages:
    block_ids: list[int]
    group_sizes: list[int]
    block_indices: list[int]


@dataclass
class Chunks:
    block_ids: list[int] = field(default_factory=list)


class Pool:
    """Two tensors and two groups: one of both tensors, one of the second tensor alone, which uses less of a page."""

    def __init__(self, pages_per_chunk: int) -> None:
        self.pages = [
            np.arange(NUM_PAGES * PAGE_BYTES).astype(np.int8).reshape(NUM_PAGES, PAGE_BYTES),
            -np.arange(NUM_PAGES * PAGE_BYTES).astype(np.int8).reshape(NUM_PAGES, PAGE_BYTES),
        ]
        row = 2 * pages_per_chunk * PAGE_BYTES + PAD  # as vLLM has them: rows of all tensors, and what aligns them
        self.memory = np.zeros((NUM_CHUNKS, row), np.int8)
        self.chunks = []
        for start in (0, pages_per_chunk * PAGE_BYTES):
            part = self.memory[:, start : start + pages_per_chunk * PAGE_BYTES]
            self.chunks.append(part.reshape(NUM_CHUNKS, pages_per_chunk, PAGE_BYTES))
        tensors = [Tensor(*map(torch.from_numpy, both)) for both in zip(self.pages, self.chunks, strict=True)]
        groups = [[Layer(0, PAGE_BYTES), Layer(1, PAGE_BYTES)], [Layer(1, PAGE_BYTES - PAD)]]
        self.copies = PageCopies(tensors, groups)


@pytest.fixture
def pool() -> Pool:
    return Pool(pages_per_chunk=1)


def test_a_page_of_each_layer_is_stored_in_its_part_of_the_chunk(pool: Pool) -> None:
    num_bytes = pool.copies.store(Pages([7, 2], [2, 0], [0, 0]), Chunks([4, 1]))

    assert num_bytes == 2 * 2 * PAGE_BYTES
    for page, chunk in ((7, 4), (2, 1)):
        for tensor in (0, 1):
            assert pool.chunks[tensor][chunk, 0].tolist() == pool.pages[tensor][page].tolist()
    assert not pool.memory[[0, 2, 3]].any()


def test_what_is_stored_is_loaded_into_other_pages_and_into_no_others(pool: Pool) -> None:
    before = [pages.copy() for pages in pool.pages]
    pool.copies.store(Pages([7, 2, 5], [2, 1], [0, 0]), Chunks([4, 1, 0]))

    num_bytes = pool.copies.load(Pages([8, 9, 3], [2, 1], [4, 0]), Chunks([4, 1, 0]))

    assert num_bytes == 2 * 2 * PAGE_BYTES + PAGE_BYTES - PAD
    for tensor in (0, 1):
        assert pool.pages[tensor][8].tolist() == before[tensor][7].tolist()
        assert pool.pages[tensor][9].tolist() == before[tensor][2].tolist()
        assert pool.pages[tensor][[0, 1, 2, 4, 5, 6, 7]].tolist() == before[tensor][[0, 1, 2, 4, 5, 6, 7]].tolist()
    assert pool.pages[0][3].tolist() == before[0][3].tolist()
    assert pool.pages[1][3, :-PAD].tolist() == before[1][5, :-PAD].tolist()
    assert pool.pages[1][3, -PAD:].tolist() == before[1][3, -PAD:].tolist()


def test_a_group_that_begins_inside_of_a_chunk_skips_what_is_before_it() -> None:
    pool = Pool(pages_per_chunk=3)

    pool.copies.store(Pages([6, 1, 8, 2, 4], [3, 2], [5, 0]), Chunks([3, 0, 2]))

    places = [(6, 3, 2), (1, 0, 0), (8, 0, 1)]  # page 5 of the request is the last one of its chunk
    for page, chunk, part in places:
        assert pool.chunks[0][chunk, part].tolist() == pool.pages[0][page].tolist()
    assert not pool.chunks[0][3, :2].any()
    assert not pool.chunks[0][0, 2].any()
    for page, part in ((2, 0), (4, 1)):
        assert pool.chunks[1][2, part, :-PAD].tolist() == pool.pages[1][page, :-PAD].tolist()


@pytest.mark.parametrize(
    ("pages", "chunks"),
    [
        (Pages([1, 2], [1, 0], [0, 0]), [1]),
        (Pages([1, 2], [2, 0], [0, 0]), [1]),
        (Pages([1, 2], [2, 0], [0, 0]), [1, 2, 3]),
        (Pages([1], [1], [0]), [1]),
    ],
    ids=["pages too many", "chunks too few", "chunks too many", "groups too few"],
)
def test_ids_that_do_not_match_are_refused_before_anything_is_copied(
    pool: Pool, pages: Pages, chunks: list[int]
) -> None:
    with pytest.raises(ValueError, match="groups, pages and chunks"):
        pool.copies.store(pages, Chunks(chunks))

    assert not pool.memory.any()


def test_a_page_that_is_not_there_is_refused(pool: Pool) -> None:
    with pytest.raises(IndexError):
        pool.copies.load(Pages([NUM_PAGES], [1, 0], [0, 0]), Chunks([0]))
