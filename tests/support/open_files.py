"""What this process has open."""

import os
from collections import Counter
from contextlib import suppress


def open_files() -> Counter[str]:
    """How many descriptors lead to each target, as the kernel names it; numbered ones of a kind are one target."""
    targets: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself, or closed meanwhile
            targets[os.readlink(f"/proc/self/fd/{number}").partition(":[")[0]] += 1
    return targets
