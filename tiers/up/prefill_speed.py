"""PrefillSpeed: an estimate of prefill time from the number of tokens and their position in the prompt."""

import numpy as np
import numpy.typing as npt

_FADING = 0.98  # decay of the weight of earlier steps per step, so that about the last fifty count
_MIN_STEPS = 3  # number of steps that must be measured before an estimate
_MIN_GAIN = 0.01  # minimum relative improvement for which a fit that is tried later is preferred


class PrefillSpeed:
    """A model of prefill time, fitted to measured engine steps: seconds = c + a · tokens + b · `tokens_read`.

    The last term is the cost of attention, which makes tokens late in the prompt more expensive. The fit is recursive
    least squares with exponential forgetting and without negative coefficients. Owned by the engine's thread.
    """

    def __init__(self) -> None:
        self._products = np.zeros((3, 3))
        self._with_seconds = np.zeros(3)
        self._num_steps = 0
        self._fit: tuple[float, float, float] | None = None

    @property
    def is_known(self) -> bool:
        """True if enough steps have been measured for an estimate."""
        return self._num_steps >= _MIN_STEPS

    def on_computed(self, num_tokens: int, num_read: float, seconds: float, num_steps: int = 1) -> None:
        """Record that *num_steps* steps computed *num_tokens* tokens in *seconds* seconds.

        *num_read* is how many tokens attention read in these steps in total (see `tokens_read`).
        """
        features = np.array([num_steps, num_tokens, num_read], np.float64)
        weight = 1.0 / max(num_tokens, 1) ** 2  # minimises the error per token, so that long steps do not dominate
        self._products = self._products * _FADING + weight * np.outer(features, features)
        self._with_seconds = self._with_seconds * _FADING + weight * seconds * features
        self._num_steps += num_steps
        self._fit = None

    def seconds(self, depth: int, num_tokens: int, chunk: int) -> float:
        """Return the seconds to compute *num_tokens* tokens after a prefix of *depth* tokens.

        Each step computes *chunk* tokens.
        """
        return float(self.seconds_of_rest(np.array([depth], np.float64), depth + num_tokens, chunk)[0])

    def seconds_of_rest(
        self, depths: npt.NDArray[np.float64], num_tokens: int | npt.NDArray[np.float64], chunk: int
    ) -> npt.NDArray[np.float64]:
        """Return for each of *depths* the seconds to compute the rest of a prompt after that many tokens.

        *num_tokens* is the length of the prompt, or an array with one length for each depth. Each step computes *chunk*
        tokens.
        """
        if self._fit is None:
            self._fit = _non_negative_fit(self._products, self._with_seconds)
        per_step, per_token, per_read = self._fit
        rest = num_tokens - depths
        seconds: npt.NDArray[np.float64] = (
            per_step * np.ceil(rest / chunk) + per_token * rest + per_read * rest * (depths + rest / 2)
        )
        return seconds


def tokens_read(depth: int, num_tokens: int) -> float:
    """Return how many tokens attention reads in total for *num_tokens* tokens after a prefix of *depth* tokens."""
    return num_tokens * (depth + num_tokens / 2)


def _non_negative_fit(
    products: npt.NDArray[np.float64], with_seconds: npt.NDArray[np.float64]
) -> tuple[float, float, float]:
    """Return the best fit with non-negative coefficients. Terms that do not improve the fit get 0.

    Among fits with about equal errors, the fit that attributes more cost to tokens is chosen. If all prompts have the
    same length, the data cannot separate the cost of a step from the cost of its tokens. A fit that attributes all cost
    to steps would make tokens seem free, so they would be recomputed instead of loaded.
    """
    scale = np.sqrt(np.maximum(np.diag(products), 1e-300))
    best, min_error = np.zeros(3), 0.0
    for kept in ([0, 1, 2], [1, 2], [0, 1], [1], [0, 2], [2], [0]):
        scaled = products[np.ix_(kept, kept)] / np.outer(scale[kept], scale[kept])
        part = np.linalg.lstsq(scaled, with_seconds[kept] / scale[kept], rcond=1e-9)[0] / scale[kept]
        error = part @ products[np.ix_(kept, kept)] @ part - 2 * part @ with_seconds[kept]  # up to a common constant
        if (part >= 0).all() and error < min_error * (1 + _MIN_GAIN):
            best, min_error = np.zeros(3), error
            best[kept] = part
            if len(kept) == 3:  # no fit with fewer coefficients is better
                break
    return float(best[0]), float(best[1]), float(best[2])
