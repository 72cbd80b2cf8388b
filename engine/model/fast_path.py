"""Fast paths: faster replacements of plain torch code, each used only if it works on this machine."""

import logging
import os
from collections.abc import Callable, Hashable

import torch

from kvtier.engine.model.errors import oom_as_memory_error

log = logging.getLogger(__name__)

SWITCH = "KVTIER_FAST_PATHS"  # environment variable: "off" makes every model use the plain paths
# Largest allowed difference from the plain path, as a fraction of its largest value.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

outcomes: dict[tuple[str, Hashable], bool] = {}  # (path, subject) -> whether it works, as tried in this process


def are_off() -> bool:
    """Return whether the environment variable KVTIER_FAST_PATHS turns off the faster replacements of torch code."""
    return os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false")


def works(path: str, subject: Hashable, largest_error: Callable[[], float], tolerance: float) -> bool:
    """Return whether the fast path called *path* may be used for *subject*, such as a dtype or the shape of a layer.

    The first call for a path and subject calls *largest_error* and keeps the outcome for the life of the process.
    *largest_error* runs the path once and returns the largest difference from the plain path, as a fraction of the
    largest value. The path is not used if *largest_error* raises, or returns NaN or more than *tolerance*. The first
    failure of each path is logged as a warning.

    Raises:
        MemoryError: If memory is short. No outcome is recorded then.
    """
    if are_off():
        return False
    key = (path, subject)
    if key not in outcomes:
        outcomes[key] = _try(path, subject, largest_error, tolerance)
    return outcomes[key]


def share_of_largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two tensors, as a fraction of the largest expected value.

    The result is NaN if a value is NaN.
    """
    difference, largest = (found.float() - expected.float()).abs().max(), expected.float().abs().max()
    return float(difference / largest if largest else difference)


def _try(path: str, subject: Hashable, largest_error: Callable[[], float], tolerance: float) -> bool:
    try:
        with oom_as_memory_error(f"trying a fast path ({path})"):
            error = largest_error()
    except MemoryError:
        raise
    except Exception as reason:  # a missing instruction or compiler, or another library version: the plain path works
        why = f"{type(reason).__name__}: {' '.join(str(reason).split())[:300]}"
    else:
        if error <= tolerance:
            return True
        why = f"its result differs from the plain path's by {error:.1e}"
    is_first = not any(other == path and not is_usable for (other, _), is_usable in outcomes.items())
    level = logging.WARNING if is_first else logging.DEBUG
    log.log(level, "fast path not used: %s for %s: %s; using the plain path, which is slower", path, subject, why)
    return False
