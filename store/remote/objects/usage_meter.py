"""`UsageMeter`: counts what was asked of a remote store."""

import threading
from dataclasses import fields

from kvtier.store.remote_store import RemoteUsage


class UsageMeter:
    """Adds up `RemoteUsage`. Any thread may call everything."""

    def __init__(self) -> None:
        self._usage = RemoteUsage()
        self._lock = threading.Lock()

    def add(self, more: RemoteUsage) -> None:
        with self._lock:
            before = self._usage
            sums = {f.name: getattr(before, f.name) + getattr(more, f.name) for f in fields(RemoteUsage)}
            self._usage = RemoteUsage(**sums)

    def usage(self) -> RemoteUsage:
        with self._lock:
            return self._usage
