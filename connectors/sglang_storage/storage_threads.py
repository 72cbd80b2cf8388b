"""`StorageThreads`: tells from the threads that call a storage whether SGLang has reset its cache."""

import threading


class StorageThreads:
    """The threads that call a storage.

    SGLang resets its cache after an update of weights, and tells no storage. But it ends the threads that call the
    storage, and starts others, for nothing else: a thread that has ended shows the reset.
    """

    def __init__(self) -> None:
        """Know of no thread."""
        self._lock = threading.Lock()
        self._seen: set[threading.Thread] = set()

    def any_ended(self) -> bool:
        """Note the calling thread. Return whether a thread that called before has ended since the last call."""
        with self._lock:
            ended = {thread for thread in self._seen if not thread.is_alive()}
            self._seen = (self._seen - ended) | {threading.current_thread()}
            return bool(ended)
