"""The check that a tier's memory is not larger than the machine's."""

import os

from kvtier.engine.config import size_text


def refuse_more_than_memory(setting: str, num_bytes: int) -> None:
    """Raise ValueError if *num_bytes*, the value of *setting*, is more than the memory of this machine."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > memory_bytes:
        raise ValueError(
            f"{setting} {size_text(num_bytes)}: is more than the memory of this machine, {size_text(memory_bytes)}; "
            "give a smaller size"
        )
