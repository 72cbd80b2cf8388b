"""PrefillSpeed: how long it takes to compute tokens, by their number and their depth in the prompt."""

import numpy as np
import numpy.typing as npt

_FADING = 0.98  # of the weight of all earlier steps with each step: about the last fifty count
_MIN_STEPS = 3
_MIN_GAIN = 0.01  # of what a fit explains, by which another must explain more than a likelier one


class PrefillSpeed:
    """Seconds of a step = c + a · tokens + b · (tokens each token reads), fitted to the steps that were measured.

    The last part is attention, which makes a deep token dearer than a shallow one. Least squares that forget; none of
    the three is negative. Owned by the engine's thread.
    """

    def __init__(self) -> None:
        self._products = np.zeros((3, 3))
        self._with_seconds = np.zeros(3)
        self._num_steps = 0
        self._fit: tuple[float, float, float] | None = None

    @property
    def is_known(self) -> bool:
        """Whether enough has been measured to say anything."""
        return self._num_steps >= _MIN_STEPS

    def on_computed(self, num_tokens: int, num_read: float, seconds: float, num_steps: int = 1) -> None:
        """Note that *num_steps* steps took *seconds* for tokens that read *num_read* tokens, see `tokens_read`."""
        features = np.array([num_steps, num_tokens, num_read], np.float64)
        weight = 1.0 / max(num_tokens, 1) ** 2  # the error by token counts, or long steps would decide alone
        self._products = self._products * _FADING + weight * np.outer(features, features)
        self._with_seconds = self._with_seconds * _FADING + weight * seconds * features
        self._num_steps += num_steps
        self._fit = None

    def seconds(self, depth: int, num_tokens: int, chunk: int) -> float:
        """Seconds to compute *num_tokens* tokens after *depth* tokens, *chunk* at a time."""
        return float(self.seconds_of_rest(np.array([depth], np.float64), depth + num_tokens, chunk)[0])

    def seconds_of_rest(
        self, depths: npt.NDArray[np.float64], num_tokens: int | npt.NDArray[np.float64], chunk: int
    ) -> npt.NDArray[np.float64]:
        """Seconds to compute a prompt of *num_tokens*, or each of several, from each of the *depths* on."""
        if self._fit is None:
            self._fit = _non_negative_fit(self._products, self._with_seconds)
        per_step, per_token, per_read = self._fit
        rest = num_tokens - depths
        seconds: npt.NDArray[np.float64] = (
            per_step * np.ceil(rest / chunk) + per_token * rest + per_read * rest * (depths + rest / 2)
        )
        return seconds


def tokens_read(depth: int, num_tokens: int) -> float:
    """How many tokens *num_tokens* tokens after *depth* tokens read, all together."""
    return num_tokens * (depth + num_tokens / 2)


def _non_negative_fit(
    products: npt.NDArray[np.float64], with_seconds: npt.NDArray[np.float64]
) -> tuple[float, float, float]:
    """The best of all fits that leave out some of the three coefficients and make none negative.

    Of those that explain the times about as well it is the one in which more tokens cost more. Prompts of one length
    say nothing of what a step costs apart: where noise laid all of it to steps, tokens seemed to cost nothing, and were
    computed although they could have been loaded.
    """
    scale = np.sqrt(np.maximum(np.diag(products), 1e-300))
    best, min_error = np.zeros(3), 0.0
    for kept in ([0, 1, 2], [1, 2], [0, 1], [1], [0, 2], [2], [0]):
        scaled = products[np.ix_(kept, kept)] / np.outer(scale[kept], scale[kept])
        part = np.linalg.lstsq(scaled, with_seconds[kept] / scale[kept], rcond=1e-9)[0] / scale[kept]
        error = part @ products[np.ix_(kept, kept)] @ part - 2 * part @ with_seconds[kept]  # less what all fits have
        if (part >= 0).all() and error < min_error * (1 + _MIN_GAIN):
            best, min_error = np.zeros(3), error
            best[kept] = part
            if len(kept) == 3:  # none that leaves something out is better
                break
    return float(best[0]), float(best[1]), float(best[2])
