"""HashRing: the order in which replicas come for a prompt, which few changes of replicas change."""

from bisect import bisect
from collections.abc import Sequence
from hashlib import blake2b

_POINTS = 64  # of each replica: their shares then differ by an eighth or so


class HashRing:
    """Consistent hashing: replicas have points on a ring, and a key's replicas are those that follow it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._points = sorted((_place(f"{name} {i}".encode()), name) for name in names for i in range(_POINTS))
        self._num_names = len(names)

    def order(self, key: bytes) -> list[str]:
        """All replicas, the key's own first. The others are the same whether it is there or not."""
        start = bisect(self._points, (_place(key), ""))
        found: dict[str, None] = {}
        for i in range(len(self._points)):
            found[self._points[(start + i) % len(self._points)][1]] = None
            if len(found) == self._num_names:
                break
        return list(found)


def _place(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")
