"""TokenCounts: how often each token of a request occurs in its output, for penalties."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """The distinct token ids of a request, each with its number of occurrences in the output.

    Owned by the request's sampler.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        """Start with the prompt's tokens at count 0, because only occurrences in the output count."""
        self._token_ids = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._num_times = np.zeros(len(self._token_ids), dtype=np.int64)
        self._places = {token_id: place for place, token_id in enumerate(self._token_ids.tolist())}

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Distinct token ids, `[tokens]`."""
        return self._token_ids[: len(self._places)]

    @property
    def num_times(self) -> npt.NDArray[np.int64]:
        """Number of occurrences in the output of each of `token_ids`, `[tokens]`."""
        return self._num_times[: len(self._places)]

    def add(self, token_id: int) -> None:
        """Count one more token of the output."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):  # double the size, so that the amortized cost per token is constant
            room = np.zeros(place + 16, dtype=np.int64)
            self._token_ids = np.concatenate([self._token_ids, room])
            self._num_times = np.concatenate([self._num_times, room])
        self._token_ids[place] = token_id
        self._num_times[place] += 1
