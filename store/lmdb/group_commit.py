"""`GroupCommit`: puts that wait for the writer go into one transaction together."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvtier.store.blob_store import Blob
from kvtier.store.codec.seal import charged_bytes


class _Call:
    """The blobs of one caller of `put`, and the result for that caller."""

    def __init__(self, blobs: Sequence[Blob]) -> None:
        self.blobs = blobs
        self.num_bytes = sum(charged_bytes(blob.raw.nbytes) for blob in blobs)
        self.done = False
        self.evicted: list[bytes] = []
        self.error: Exception | None = None


class GroupCommit:
    """Gathers the calls that come while a change is under way; the next change stores them all, up to *most_bytes*.

    The call that gets the *writer* lock works for all that wait: there is no thread for it, and a lone call waits for
    none. If that call is interrupted, the next one that gets the lock works for those that are left.
    """

    def __init__(self, writer: threading.RLock, most_bytes: int, act: Callable[[Sequence[Blob]], list[bytes]]) -> None:
        self._writer = writer
        self._most_bytes = most_bytes
        self._act = act
        self._waiting: list[_Call] = []  # each call appends itself and, with the writer lock, removes itself

    @property
    def num_waiting(self) -> int:
        """Calls that wait or are at work."""
        return len(self._waiting)

    def put(self, blobs: Sequence[Blob]) -> list[bytes]:
        """Store *blobs* and return the keys evicted for this call. Raises what *act* raises.

        When it has returned or raised, interrupted or not, no thread reads *blobs* any more.
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
        """The next waiting calls, of at most `most_bytes` together, or one larger call. At least one call waits."""
        calls: list[_Call] = []
        num_bytes = 0
        for call in self._waiting.copy():  # other threads append meanwhile
            if not call.done:
                num_bytes += call.num_bytes
                if calls and num_bytes > self._most_bytes:
                    break
                calls.append(call)
        return calls

    def _serve(self, calls: Sequence[_Call]) -> None:
        try:
            evicted = self._act([blob for call in calls for blob in call.blobs])
        except Exception as error:  # raised in the thread of each caller
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
