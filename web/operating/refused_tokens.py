"""RefusedTokens: has the audit log say how many wrong tokens came, in at most a line a minute."""

import time
from collections.abc import Callable

from kvtier.web.operating.audit_log import AuditLog

REFUSED_S = 60.0  # between two lines


class RefusedTokens:
    """The wrong tokens that the audit log has not been told of. Owned by the event loop."""

    def __init__(self, audit: AuditLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._audit = audit
        self._clock = clock
        self._num_refused = 0
        self._told_at = float("-inf")

    def note(self) -> None:
        """Note a wrong token. A line for each would let any client push the other lines out of the file."""
        self._num_refused += 1
        if self._clock() >= self._told_at + REFUSED_S:
            self._audit.write(None, "", {}, {"status": 401, "times": self._num_refused})
            self._num_refused, self._told_at = 0, self._clock()
