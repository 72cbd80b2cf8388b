"""Errors for a model that cannot use kvtier's blocks, or that was changed while it used them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Matches the out-of-memory messages of torch (CPU, CUDA, cuBLAS), of C++ and of errno 12.
_SHORT = re.compile("allocate memory|out of memory|bad_alloc|ALLOC_FAILED", re.IGNORECASE)


class UnsupportedModel(ValueError):
    """An error for a model that kvtier cannot serve, because of its attention or of weights that cannot be read.

    The message says why.
    """


class ChangedModel(RuntimeError):
    """An error for a model that was changed since it was loaded, so that its cached blocks no longer match it."""


def is_short_of_memory(error: Exception) -> bool:
    """Return whether an error of any library says that memory ran out."""
    return isinstance(error, MemoryError) or bool(_SHORT.search(str(error)))


@contextmanager
def oom_as_memory_error(doing: str) -> Iterator[None]:
    """Convert out-of-memory errors raised in the context to MemoryError.

    The message begins with *doing*, which names the activity, for example "loading the adapter x".
    """
    try:
        yield
    except Exception as error:  # libraries raise errors of many types if memory is short
        if isinstance(error, MemoryError) or not _SHORT.search(str(error)):
            raise
        raise MemoryError(f"{doing}: {str(error).strip().splitlines()[0]}") from error
