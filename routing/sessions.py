"""Sessions: which replica had a conversation last."""

from collections import OrderedDict
from collections.abc import Hashable


class Sessions:
    """The replicas of the conversations that were asked for last, *most* of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._replicas: OrderedDict[Hashable, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def replica_of(self, session: Hashable) -> str | None:
        """The replica that had it last; None if nobody is known to have."""
        return self._replicas.get(session)

    def keep(self, session: Hashable, replica: str) -> None:
        """Note who has it now."""
        self._replicas[session] = replica
        self._replicas.move_to_end(session)
        if len(self._replicas) > self._most:
            self._replicas.popitem(last=False)

    def forget(self, replica: str) -> None:
        """The replica has no conversation any more."""
        self._replicas = OrderedDict((key, name) for key, name in self._replicas.items() if name != replica)
