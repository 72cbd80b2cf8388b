"""Short memory told apart from a model that cannot be used: torch raises a RuntimeError for both."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Words of torch (CPU, CUDA, cuBLAS), of C++ and of the kernel's errno 12, wherever they come up.
_SHORT = re.compile("allocate memory|out of memory|bad_alloc|ALLOC_FAILED", re.IGNORECASE)


@contextmanager
def short_memory_raised(doing: str) -> Iterator[None]:
    """MemoryError, with what was being done, for every error meanwhile that says that memory could not be had."""
    try:
        yield
    except Exception as error:  # libraries say so by errors of many types
        if isinstance(error, MemoryError) or not _SHORT.search(str(error)):
            raise
        raise MemoryError(f"{doing}: {str(error).strip().splitlines()[0]}") from error
