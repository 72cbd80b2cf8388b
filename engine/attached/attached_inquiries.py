"""Lookups in a sidecar's remote tier."""

from collections.abc import Callable, Sequence

from kvtier.engine.attached.wire import MAX_BLOCKS, FromEngine, Inquire, Inquired, joined, names_in
from kvtier.tiers.lower.lower_tiers import NOTHING_TO_ASK, Inquiry
from kvtier.tiers.lower.remote.presence import RemoteHints
from kvtier.tiers.naming.block_hash import BlockName

INQUIRY_S = 0.3  # timeout of a sidecar's answer; the sidecar itself gives up much earlier


class AttachedInquiry:
    """A lookup in a sidecar's remote tier; implements `Inquiry`."""

    def __init__(self, group_id: int, until: float) -> None:
        self.group_id = group_id
        self.until = until
        self.is_done = False


class AttachedInquiries:
    """The lookups that wait for a sidecar's answer.

    *presence* records which blocks are probably in the remote tier. Blocks that a lookup finds are added to it. Owned
    by the engine's thread.
    """

    def __init__(self, presence: RemoteHints, send: Callable[[FromEngine], None], clock: Callable[[], float]) -> None:
        self._presence = presence
        self._send = send
        self._clock = clock
        self._waiting: dict[int, AttachedInquiry] = {}  # by number
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, group_id: int, names: Sequence[BlockName]) -> Inquiry:
        """Ask the sidecar which of the blocks *names* its remote tier has, see `LowerHints.inquire`."""
        names = names[self._presence.num_held(group_id, names) :][:MAX_BLOCKS]
        if not names:
            return NOTHING_TO_ASK
        number, self._next_number = self._next_number, self._next_number + 1
        inquiry = self._waiting[number] = AttachedInquiry(group_id, self._clock() + INQUIRY_S)
        self._send(Inquire(number, group_id, joined(names)))
        return inquiry

    def on_answered(self, message: Inquired) -> None:
        """Record the sidecar's answer to a lookup."""
        if (inquiry := self._waiting.pop(message.number, None)) is not None:
            self._presence.add(inquiry.group_id, names_in(message.names))
            inquiry.is_done = True

    def go_on(self) -> None:
        """End lookups that have timed out."""
        for number, inquiry in list(self._waiting.items()):
            if self._clock() >= inquiry.until:
                inquiry.is_done = True
                del self._waiting[number]

    def end(self) -> None:
        """End all lookups, because the sidecar is gone."""
        for inquiry in self._waiting.values():
            inquiry.is_done = True
        self._waiting.clear()
