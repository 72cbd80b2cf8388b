"""LayerGate: makes the computation of a layer wait until the layer's part of the loaded blocks has been copied."""

import threading
import time


class LayerGate:
    """A gate for layer-wise loading: a layer can be computed while later layers of the prompt's blocks are copied.

    The blocks are copied in *num_parts* parts. Each part consists of consecutive layers of all blocks. The copying
    thread opens one part after the other. The computing thread waits for the part that contains its next layer.

    The blocks in an open part have been copied, but may not be verified yet. The engine discards the computed result if
    a block proves to be corrupt, or if a wait timed out (`missed`).
    """

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts
        self.missed = False  # whether a wait timed out; set by the computing thread
        self._num_open = 0
        self._condition = threading.Condition()

    def layers(self, part: int, num_layers: int) -> range:
        """Return the layers that *part* contains, of an attention group with *num_layers* layers. May be empty."""
        return range(-(-part * num_layers // self.num_parts), -(-(part + 1) * num_layers // self.num_parts))

    def open_next(self) -> None:
        """Open the next part. Call this when the part has been copied."""
        with self._condition:
            self._num_open += 1
            self._condition.notify_all()

    def open_all(self) -> None:
        """Open all parts, so that the computing thread does not wait. Call this if nothing more will be copied."""
        with self._condition:
            self._num_open = self.num_parts
            self._condition.notify_all()

    def wait(self, layer: int, num_layers: int, give_up_at: float) -> None:
        """Wait until the layer's part is open. Set `missed` if that takes until the monotonic time *give_up_at*."""
        part = layer * self.num_parts // num_layers
        if part < self._num_open:
            return
        with self._condition:
            timeout_s = max(0.0, give_up_at - time.monotonic())
            if not self._condition.wait_for(lambda: part < self._num_open, timeout_s):
                self.missed = True
