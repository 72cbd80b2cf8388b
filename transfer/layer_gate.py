"""LayerGate: lets a layer's compute wait until the layer's part of the blocks has been copied."""

import threading
import time


class LayerGate:
    """A gate that signals to the computing thread which layers of a prompt's blocks have been copied.

    The blocks arrive in *num_parts* parts; each part holds consecutive layers of all blocks. The thread that copies the
    blocks opens the parts one after the other. The computing thread waits for the part of its next layer.

    An open part means that its copies have ended, not that they are correct. The engine computes before all blocks are
    verified, and discards the result if a block is corrupt or if a wait timed out (`missed`).
    """

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts
        self.missed = False  # whether a wait timed out; set by the computing thread
        self._num_open = 0
        self._condition = threading.Condition()

    def layers(self, part: int, num_layers: int) -> range:
        """Return which of a group's *num_layers* layers arrive in *part*. The range may be empty."""
        return range(-(-part * num_layers // self.num_parts), -(-(part + 1) * num_layers // self.num_parts))

    def open_next(self) -> None:
        """Open the next part after its copy has ended."""
        with self._condition:
            self._num_open += 1
            self._condition.notify_all()

    def open_all(self) -> None:
        """Open all parts, because nothing more will arrive and the computing thread must not wait."""
        with self._condition:
            self._num_open = self.num_parts
            self._condition.notify_all()

    def wait(self, layer: int, num_layers: int, give_up_at: float) -> None:
        """Wait until the layer's part is open; at the monotonic time *give_up_at* set `missed` instead."""
        part = layer * self.num_parts // num_layers
        if part < self._num_open:
            return
        with self._condition:
            timeout_s = max(0.0, give_up_at - time.monotonic())
            if not self._condition.wait_for(lambda: part < self._num_open, timeout_s):
                self.missed = True
