"""Staging buffers between copies: a copy that is under way from one is not disturbed by the next that takes it."""

import numpy as np
import pytest
import torch
from cuda_devices import EVERY_FAKE, GPU_0, CudaKind

from kvtier.transfer.cuda.copies import Ends, StagedCopies

BLOCK_BYTES = 5000  # three of them in a staging buffer of a fake device
NUM_SLOTS = 12
ALL = np.arange(NUM_SLOTS)


def make_ends() -> Ends:
    device = torch.zeros(NUM_SLOTS, BLOCK_BYTES, dtype=torch.uint8, device=GPU_0)
    host = torch.zeros(NUM_SLOTS, BLOCK_BYTES, dtype=torch.uint8)
    return Ends(device, host, NUM_SLOTS)


@pytest.mark.parametrize("kind", EVERY_FAKE)
@pytest.mark.parametrize(("direction", "fails"), [("down", "a gather"), ("up", "a scatter")])
def test_a_copy_that_fails_half_way_gives_its_buffers_back_only_when_they_are_still(
    kind: CudaKind, direction: str, fails: str
) -> None:
    """The copy that takes them next is on another stream, which waits for nothing of the first."""
    with kind.opened() as cuda:
        assert cuda.fake is not None
        ends = make_ends()
        copies = StagedCopies(ends)
        torch.cuda.synchronize()
        cuda.fake.fail(fails, number=2)
        with pytest.raises(RuntimeError, match="out of memory"):
            (copies.to_host if direction == "down" else copies.to_device)(ALL, ALL)

        with torch.cuda.stream(torch.cuda.Stream()):
            ends.device.fill_(7)
            copies.to_host(ALL, ALL)

        assert bool((ends.host == 7).all())


@pytest.mark.parametrize("kind", EVERY_FAKE)
def test_a_host_slot_may_be_written_again_as_soon_as_its_copy_up_has_returned(kind: CudaKind) -> None:
    with kind.opened():
        ends = make_ends()
        ends.host.fill_(7)

        StagedCopies(ends).to_device(ALL, ALL)
        ends.host.fill_(8)

        assert bool((ends.device == 7).all())
