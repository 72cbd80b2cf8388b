"""Slot ids, as calls take and give them: lists, arrays, and numpy's own index arrays."""

from array import array
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.intp]  # the integers that numpy indexes with; it converts all other ones each time, in 1.3 us
Slots = Sequence[int] | npt.NDArray[np.integer[Any]]  # distinct slots
ABSENT = -1  # in place of a slot: the block is not here
NOTHING = np.empty(0, np.intp)
MANY = 128  # slots; from about here on numpy calls beat a loop over ints (measured)


def as_ids(slots: Slots) -> Ids:
    """The slots as numpy indexes with; the caller's own memory if they are that already."""
    return np.asarray(view_of(slots) if isinstance(slots, array) else slots, np.intp)


def as_ints(slots: Slots) -> list[int]:
    """The slots as a list of Python's ints; the caller's own if it is one already."""
    if isinstance(slots, list):
        return slots
    return cast(list[int], slots.tolist()) if isinstance(slots, (np.ndarray, array)) else list(slots)


def view_of(numbers: "array[int]") -> npt.NDArray[np.int32]:
    """The same memory for numpy. Python reads an array's items at the speed of a list's, numpy all of them at once."""
    return np.frombuffer(numbers, np.int32) if numbers else np.empty(0, np.int32)
