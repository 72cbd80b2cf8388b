"""Verifier: checks leased chunks against their digests. Several requests for one chunk share the result."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.sidecar.lmcache.digest_lane import DigestLane
from kvtier.transfer.block_memory import HostMemory

FRESH_S = 1.0  # how long after its beginning a verification also counts for other requests

Deliver = Callable[[Sequence[int], Sequence[bool | None]], None]
"""A callback with places in the request, and for each place whether its chunk is intact; None if that is unknown."""


@dataclass(eq=False, slots=True)
class Checked:
    """A chunk that callers of `Verifier.verify` have leased, and the result of its last verification."""

    memory: HostMemory
    slot: int
    digest: bytes
    begun_at: float
    is_good: bool = False  # also False before the result is known
    num_holders: int = 0
    waiting: list[tuple[Deliver, int]] = field(default_factory=list)


class Verifier:
    """Verification of leased chunks. Several requests for one chunk share a result. Owned by the endpoint's thread.

    Many requests for one document may arrive at once. So a result is reused for other requests until `FRESH_S` seconds
    after its verification began, as long as the chunk stays leased. The lease protects the slot from reuse.

    The bytes change only if a process writes to the slot without a lease. This goes unnoticed for at most `FRESH_S`
    seconds.
    """

    def __init__(self, lane: DigestLane, clock: Callable[[], float]) -> None:
        self._lane = lane
        self._clock = clock
        self._held: dict[tuple[HostMemory, int], Checked] = {}

    def verify(
        self, client: object, memory: HostMemory, slots: Sequence[int], digests: Sequence[bytes], deliver: Deliver
    ) -> list[Checked]:
        """Check whether the chunks in these slots, which the caller has leased, have these digests.

        Returns an entry for each slot, in order, which the caller later passes to `release`. If the entry says that the
        chunk is good, *deliver* is not called for it. For all other chunks, a later `poll` of the transfers calls
        *deliver*. *client* is the client for which the chunks are checked.
        """
        now = self._clock()
        given: list[Checked] = []
        to_read: list[Checked] = []
        for i, (slot, digest) in enumerate(zip(slots, digests, strict=True)):
            checked = self._held.get((memory, slot))
            if checked is None or checked.digest != digest or now - checked.begun_at > FRESH_S:
                checked = self._held[memory, slot] = Checked(memory, slot, digest, now)
                to_read.append(checked)
            if not checked.is_good:
                checked.waiting.append((deliver, i))
            checked.num_holders += 1
            given.append(checked)
        if to_read:
            self._lane.take(
                client,
                memory,
                [checked.slot for checked in to_read],
                lambda places, digests: self._on_digests(to_read, places, digests),
                lambda places: any(each.num_holders for each in to_read[places.start : places.stop]),
            )
        return given

    def release(self, given: Iterable[Checked]) -> None:
        """Record that the caller's leases on chunks end. *given* has what `verify` returned for these chunks.

        A chunk that no caller has leased any more is not read, unless its verification has begun. Results that come
        later say nothing about the chunk, because its slot may have another one by then.
        """
        for checked in given:
            checked.num_holders -= 1
            if not checked.num_holders:
                self._drop(checked)

    def check(self, given: Iterable[Checked]) -> None:
        """Raise AssertionError unless *given* has the entries that callers got from `verify` and have not released."""
        holders = Counter(given)
        assert all(checked.num_holders == num for checked, num in holders.items()), "holders are miscounted"
        assert holders.keys() >= set(self._held.values()), "a chunk is known that no promise holds"

    def _on_digests(self, read: Sequence[Checked], part: range, digests: Sequence[bytes] | None) -> None:
        told: dict[Deliver, tuple[list[int], list[bool | None]]] = {}
        for number, checked in enumerate(read[part.start : part.stop]):
            is_good = None if digests is None else digests[number] == checked.digest
            checked.is_good = bool(is_good)
            if not is_good:
                self._drop(checked)
            for deliver, i in checked.waiting:
                places, results = told.setdefault(deliver, ([], []))
                places.append(i)
                results.append(is_good)
            checked.waiting.clear()
        for deliver, (places, results) in told.items():
            deliver(places, results)

    def _drop(self, checked: Checked) -> None:
        place = (checked.memory, checked.slot)
        if self._held.get(place) is checked:
            del self._held[place]
