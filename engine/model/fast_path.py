"""Fast paths: code that computes what plain torch computes in less time, where processor and libraries allow it."""

import logging
import os
from collections.abc import Callable, Hashable

import torch

from kvtier.engine.model.short_memory import short_memory_raised

log = logging.getLogger(__name__)

SWITCH = "KVTIER_FAST_PATHS"  # environment variable: "off" makes every model take the plain paths
# Largest difference from the plain path, as a share of its largest value.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

outcomes: dict[tuple[str, Hashable], bool] = {}  # of this process: by fast path and subject, whether it works


def are_off() -> bool:
    """Return whether the environment switches every fast path off."""
    return os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false")


def works(path: str, subject: Hashable, largest_error: Callable[[], float], tolerance: float) -> bool:
    """Return whether the fast path may be taken for *subject*, for example a dtype or the shape of a layer.

    The first call in a process runs *largest_error*, which runs the path once and returns how far its result is from
    that of the plain path, as a share of the largest value. If it raises, or the error is above *tolerance* or no
    number, the plain path is taken, and a warning says why: one for each path.

    Raises:
        MemoryError: If memory is short, which says nothing about the path.
    """
    if are_off():
        return False
    key = (path, subject)
    if key not in outcomes:
        outcomes[key] = _try(path, subject, largest_error, tolerance)
    return outcomes[key]


def share_of_largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest expected value; NaN where a number is none."""
    difference, largest = (found.float() - expected.float()).abs().max(), expected.float().abs().max()
    return float(difference / largest if largest else difference)


def _try(path: str, subject: Hashable, largest_error: Callable[[], float], tolerance: float) -> bool:
    try:
        with short_memory_raised(f"trying a fast path ({path})"):
            error = largest_error()
    except MemoryError:
        raise
    except Exception as reason:  # no such instruction, no compiler, another version of a library: the plain path works
        why = f"{type(reason).__name__}: {' '.join(str(reason).split())[:300]}"
    else:
        if error <= tolerance:
            return True
        why = f"its result differs from the plain one by {error:.1e}"
    is_first = not any(other == path and not is_usable for (other, _), is_usable in outcomes.items())
    level = logging.WARNING if is_first else logging.DEBUG
    log.log(level, "fast path not used: %s for %s: %s; the plain path is used, which is slower", path, subject, why)
    return False
