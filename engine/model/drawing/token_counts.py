"""TokenCounts: which tokens a request has had, and how often its output has each."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """Token ids, each once, and how often the output has them. Owned by the request's sampler."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        """The prompt's tokens are there from the beginning, and counted in the output only."""
        self._token_ids = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._num_times = np.zeros(len(self._token_ids), dtype=np.int64)
        self._places = {token_id: place for place, token_id in enumerate(self._token_ids.tolist())}

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The token ids, `[tokens]`."""
        return self._token_ids[: len(self._places)]

    @property
    def num_times(self) -> npt.NDArray[np.int64]:
        """How often the output has each of `token_ids`, `[tokens]`."""
        return self._num_times[: len(self._places)]

    def add(self, token_id: int) -> None:
        """Count one more token of the output."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):  # twice the room, so that a token costs the same at any length
            room = np.zeros(place + 16, dtype=np.int64)
            self._token_ids = np.concatenate([self._token_ids, room])
            self._num_times = np.concatenate([self._num_times, room])
        self._token_ids[place] = token_id
        self._num_times[place] += 1
