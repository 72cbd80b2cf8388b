"""Conversion of out-of-memory errors to MemoryError, because torch raises RuntimeError for them and for bad models."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Messages of torch (CPU, CUDA, cuBLAS), of C++ and of errno 12.
_SHORT = re.compile("allocate memory|out of memory|bad_alloc|ALLOC_FAILED", re.IGNORECASE)


@contextmanager
def oom_as_memory_error(doing: str) -> Iterator[None]:
    """Convert out-of-memory errors raised in the context to a MemoryError that says what *doing* was."""
    try:
        yield
    except Exception as error:  # libraries report it by errors of many types
        if isinstance(error, MemoryError) or not _SHORT.search(str(error)):
            raise
        raise MemoryError(f"{doing}: {str(error).strip().splitlines()[0]}") from error
