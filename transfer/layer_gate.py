"""LayerGate: lets a layer be computed as soon as its KV data is loaded, while later layers are still being loaded."""

import threading
import time


class LayerGate:
    """A gate for layer-wise loading: computation waits for the layers that it needs, not for whole blocks.

    The blocks of a prompt are copied in *num_parts* parts. Each part consists of consecutive layers of all blocks. The
    copying thread opens each part when it has been copied. The computing thread waits for the part with its next layer.

    The checksums of the blocks may be verified later. The engine discards the computed result if a block proves to be
    corrupt, or if a wait timed out (`missed`).
    """

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts
        self.missed = False  # whether a wait timed out; set by the computing thread
        self._num_open = 0
        self._condition = threading.Condition()

    def layers(self, part: int, num_layers: int) -> range:
        """Divide *num_layers* layers into `num_parts` ranges, and return the range with index *part*. May be empty."""
        return range(-(-part * num_layers // self.num_parts), -(-(part + 1) * num_layers // self.num_parts))

    def open_next(self) -> None:
        """Open the next part of the layers to the computing thread. Call this when that part has been copied."""
        with self._condition:
            self._num_open += 1
            self._condition.notify_all()

    def open_all(self) -> None:
        """Open all layers, so that the computing thread stops waiting. Call this if no more layers will be copied."""
        with self._condition:
            self._num_open = self.num_parts
            self._condition.notify_all()

    def wait(self, layer: int, num_layers: int, give_up_at: float) -> None:
        """Wait until *layer* of *num_layers* may be used. At the monotonic time *give_up_at*, stop and set `missed`."""
        part = layer * self.num_parts // num_layers
        if part < self._num_open:
            return
        with self._condition:
            timeout_s = max(0.0, give_up_at - time.monotonic())
            if not self._condition.wait_for(lambda: part < self._num_open, timeout_s):
                self.missed = True
