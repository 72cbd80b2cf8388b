"""Group commit: calls that wait for the writer go into one transaction."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvtier.store.blob_store import Blob
from kvtier.store.codec.seal import charged_bytes


class _Call:
    """One caller's blobs, and what became of them."""

    def __init__(self, blobs: Sequence[Blob]) -> None:
        self.blobs = blobs
        self.num_bytes = sum(charged_bytes(blob.raw.nbytes) for blob in blobs)
        self.done = False
        self.evicted: list[bytes] = []
        self.error: Exception | None = None


class GroupCommit:
    """While one change is under way, the calls behind it gather; the next change takes them all, up to *most_bytes*.

    The call that gets the *writer* lock works for all: there is no thread of its own, and a lone call waits for nobody.
    If he is interrupted, the next of them does, for whom he did not get done.
    """

    def __init__(self, writer: threading.RLock, most_bytes: int, act: Callable[[Sequence[Blob]], list[bytes]]) -> None:
        self._writer = writer
        self._most_bytes = most_bytes
        self._act = act
        self._waiting: list[_Call] = []  # who comes enters himself and, with the writer lock, takes himself off

    @property
    def num_waiting(self) -> int:
        """Calls that are in line or at work."""
        return len(self._waiting)

    def put(self, blobs: Sequence[Blob]) -> list[bytes]:
        """Store *blobs*; the keys evicted for them, those of other calls left to these. Raises what `act` does.

        Nobody reads *blobs* any more when it returns or, interrupted, raises.
        """
        call = _Call(blobs)
        try:
            self._waiting.append(call)
            with self._writer:
                while not call.done:
                    self._serve(self._gathered())
                self._waiting.remove(call)
        except BaseException:
            with self._writer, suppress(ValueError):
                self._waiting.remove(call)
            raise
        if call.error is not None:
            raise call.error
        return call.evicted

    def _gathered(self) -> list[_Call]:
        """The next in line, of `most_bytes` together or one; there is one."""
        calls: list[_Call] = []
        num_bytes = 0
        for call in self._waiting.copy():  # others append meanwhile
            if not call.done:
                num_bytes += call.num_bytes
                if calls and num_bytes > self._most_bytes:
                    break
                calls.append(call)
        return calls

    def _serve(self, calls: Sequence[_Call]) -> None:
        try:
            evicted = self._act([blob for call in calls for blob in call.blobs])
        except Exception as error:  # the callers' to handle
            if len(calls) > 1:  # one may be to blame
                for call in calls:
                    self._serve([call])
                return
            calls[0].error, calls[0].done = error, True
            return
        for call in calls[1:]:
            own = {blob.key for blob in call.blobs}
            call.evicted = [key for key in evicted if key in own]
        others = {key for call in calls[1:] for key in call.evicted}
        calls[0].evicted = [key for key in evicted if key not in others]
        for call in calls:
            call.done = True
