"""Copies of many pages: the same bytes, on the calling thread only."""

import os
import subprocess
import sys

import pytest
import torch

from kvtier.connectors.page_moves import copy_pages

CASES = [(1 << 17, 0), (1 << 20, 0), (1 << 20, 3)]
# torch is imported once. Each case is a forked process, because torch starts its threads only once.
NUM_THREADS = """
import os, torch
from kvtier.connectors.page_moves import copy_pages

def num_threads():
    return len(os.listdir("/proc/self/task"))

for page_bytes, offset in {cases}:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    pages, rows = (torch.empty(4, page_bytes + offset, dtype=torch.uint8)[:, offset:] for _ in range(2))
    before = num_threads()
    copy_pages(list(rows), list(pages))
    after = num_threads()
    torch._foreach_copy_(list(rows), list(pages))
    print(after - before, num_threads() - after, flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("num_bytes", [1, 4096, 16_384, 16_385, 1 << 17, (1 << 17) + 8, (1 << 20) + 4])
@pytest.mark.parametrize("offset", [0, 3])
def test_pages_of_any_size_and_place_are_copied(num_bytes: int, offset: int) -> None:
    sources = torch.randint(0, 255, (3, num_bytes + offset), dtype=torch.uint8)
    targets = torch.zeros_like(sources)

    copy_pages([each[offset:] for each in targets], [each[offset:] for each in sources])

    assert torch.equal(targets[:, offset:], sources[:, offset:])
    assert not targets[:, :offset].any()


def test_as_many_targets_as_sources_are_wanted() -> None:
    with pytest.raises(ValueError, match="longer"):
        copy_pages([torch.zeros(1, dtype=torch.uint8)], [torch.zeros(1, dtype=torch.uint8)] * 2)


def test_no_other_thread_copies() -> None:
    """torch starts its threads with the first copy that they share. The second number shows that it would have."""
    done = subprocess.run(
        [sys.executable, "-c", NUM_THREADS.format(cases=CASES)],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )

    started = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(started) == len(CASES)
    for by_copy_pages, by_torch in started:
        assert by_copy_pages == 0
        assert by_torch > 0
