"""Types for slot ids, and conversions between lists, arrays and numpy index arrays."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.intp]  # numpy's index type; indexing with any other integer type takes 1.3 us for the conversion
Slots = Sequence[int] | npt.NDArray[np.integer[Any]]  # distinct slots
ABSENT = -1  # in place of a slot: the block is not in this pool
NOTHING = np.empty(0, np.intp)
MANY = 128  # number of slots from which on numpy calls are faster than a loop over ints (measured)


def view_of(numbers: "array[int]") -> npt.NDArray[np.int32]:
    """Return a numpy view of *numbers*, for operations on many items. The array itself is faster for single items."""
    return np.frombuffer(numbers, np.int32) if numbers else np.empty(0, np.int32)
