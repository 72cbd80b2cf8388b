"""Quarantine: keeps the slots of an ended session leased while a process may still copy from or to them."""

import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from kvtier.sidecar.endpoint import AttachedClient, LeaseUse

log = logging.getLogger(__name__)

TELL_AFTER_S = 5.0  # log a client after this long in quarantine; a process that is being killed ends sooner
MAX_CLIENTS = 512  # limit on the clients in quarantine, because each keeps a descriptor open
PIECE_BYTES = 256 << 10  # bytes to receive and drop at a time from the connection of an ended session
MAX_PIECES = 16  # limit on the pieces that one check receives and drops


class Lifeline:
    """The connection of an ended session, kept open to detect when the client's processes have closed it or ended.

    The kernel reports the end of the connection when no process has the other end open any more. This works across pid
    namespaces. A process stopped by SIGSTOP keeps the connection open, so it does not count as ended.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Take over *connection* without sending anything to the client."""
        self._connection = connection

    @classmethod
    def after_farewell(cls, connection: socket.socket) -> Self:
        """Take over *connection*, and tell the client that nothing more will be sent."""
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        return cls(connection)

    @property
    def is_cut(self) -> bool:
        """True if every process has closed the other end of the connection.

        Data that the client has sent is received and dropped, because TCP reports the end of a connection only after
        its data.
        """
        if self._connection.fileno() < 0:
            return True
        try:
            for _ in range(MAX_PIECES):
                if not self._connection.recv(PIECE_BYTES, socket.MSG_DONTWAIT):
                    break
            else:
                return False
        except BlockingIOError:
            return False
        except OSError:  # it was reset
            pass
        self.close()
        return True

    def close(self) -> None:
        """Close the sidecar's end of the connection."""
        self._connection.close()


@dataclass(frozen=True, slots=True)
class QuarantineStatistics:
    """Number of clients and slots in quarantine."""

    num_clients: int = 0
    num_chunks: int = 0  # slots of all groups


@dataclass(eq=False, slots=True)
class _Held:
    endpoint: str
    client: AttachedClient
    holders: Callable[[], Sequence[str]]
    let_go: Callable[[], None]
    is_told: bool = False

    @property
    def num_chunks(self) -> int:
        return sum(lease.num_chunks for lease in self.client.leases)


class Quarantine:
    """The leases of ended sessions, kept while one of the client's processes may still copy from or to the slots.

    A process that is stopped in the middle of a copy continues the copy when it is woken up, even after its session has
    ended. While such a process may exist, no other block is put into the leased slots, and messages about these slots
    are ignored. Owned by the sidecar's thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: list[_Held] = []

    def __len__(self) -> int:
        return len(self._held)

    def hold(
        self,
        endpoint: str,
        client: AttachedClient,
        holders: Callable[[], Sequence[str]],
        let_go: Callable[[], None],
    ) -> None:
        """Keep the leases of *client* while one of its processes may still copy, then call *let_go* to end them.

        Args:
            endpoint: Prefix of the log lines.
            client: Client whose session has ended.
            holders: Returns the names of the processes that may still copy. It is called repeatedly until it returns
                an empty sequence.
            let_go: Ends the leases. It is called at once if there are no leases or no processes that may copy.
        """
        if not client.leases or not holders():
            let_go()
            return
        leases = tuple(replace(lease, use=LeaseUse.QUARANTINED) for lease in client.leases)
        self._held.append(_Held(endpoint, replace(client, since=self._clock(), leases=leases), holders, let_go))

    def poll(self) -> None:
        """End the leases whose slots no process can use any more. Log each client that stays in quarantine for long."""
        waiting, self._held = self._held, []
        for held in waiting:
            if names := held.holders():
                self._held.append(held)
                self._tell(held, names)
                continue
            held.let_go()
            if held.is_told:
                log.info(
                    "%s: %d slots of %s left quarantine, because no process can still copy from or to them",
                    held.endpoint,
                    held.num_chunks,
                    held.client.name,
                )

    def clients(self) -> list[AttachedClient]:
        """Return the clients with slots in quarantine. Their *since* is the time when the quarantine began."""
        return [held.client for held in self._held]

    def statistics(self) -> QuarantineStatistics:
        """Return the number of clients and slots in quarantine."""
        return QuarantineStatistics(len(self._held), sum(held.num_chunks for held in self._held))

    def close(self) -> None:
        """End all leases. Put no block into any slot afterwards: processes of ended sessions may still copy there."""
        held, self._held = self._held, []
        for each in held:
            each.let_go()

    def _tell(self, held: _Held, names: Sequence[str]) -> None:
        if not held.is_told and self._clock() - held.client.since > TELL_AFTER_S:
            held.is_told = True
            log.warning(
                "%s: %d slots of %s are in quarantine: its session has ended, but %s may still copy from or to these "
                "slots; wake that process up or kill it. The slots become free when all processes of the engine have "
                "ended or, with kvtier's own client, when the engine attaches again",
                held.endpoint,
                held.num_chunks,
                held.client.name,
                " and ".join(dict.fromkeys(names)),
            )
