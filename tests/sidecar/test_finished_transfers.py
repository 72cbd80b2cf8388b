"""The queue with a descriptor: readable when it should be, closed once, and not written to after that."""

import os
import select

import pytest

from kvtier.sidecar.finished_transfers import FinishedTransfers
from kvtier.transfer.lane import Transfer


def is_readable(file: int) -> bool:
    return bool(select.select([file], [], [], 0)[0])


def test_it_is_readable_from_each_transfer_and_each_wake_on_until_reset() -> None:
    finished = FinishedTransfers()
    seen = [is_readable(finished.file)]
    for act in (finished.wake, finished.wake, finished.reset, finished.reset):
        act()
        seen.append(is_readable(finished.file))
    finished.put(Transfer(int, 0, lambda transfer: None))
    seen.append(is_readable(finished.file))
    finished.close()

    assert seen == [False, True, True, False, False, True]
    assert finished.get().num_bytes == 0


def test_after_its_end_neither_waking_nor_closing_touches_what_has_its_number_now() -> None:
    finished = FinishedTransfers()
    number = finished.file
    finished.close()
    another = os.memfd_create("another")
    os.dup2(another, number)  # as an open would do it that comes next

    finished.wake()  # a signal, or a question over HTTP, that comes late
    finished.close()

    assert os.fstat(number).st_size == 0
    for file in {another, number}:
        os.close(file)  # raises if it has been closed
    with pytest.raises(ValueError, match="closed"):
        assert finished.file
