"""LayerGate: has the computing of a layer wait until the layer's part of the blocks has arrived."""

import threading
import time


class LayerGate:
    """Tells the thread that computes which layers of a prompt's blocks have arrived.

    Blocks arrive in *num_parts*, each some consecutive layers of all of them. A lane's thread opens one part after the
    other; the thread that computes waits for the part of the layer that it comes to.

    A gate says that copies have landed, not that they are right: the engine, which computes before everything is
    verified, throws the result away if a block is wrong, or if a wait ended without its layer (`missed`).
    """

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts
        self.missed = False  # a step went on without a layer; set by the thread that waits
        self._num_open = 0
        self._condition = threading.Condition()

    def layers(self, part: int, num_layers: int) -> range:
        """Which of a group's *num_layers* layers arrive in that part; there may be none."""
        return range(-(-part * num_layers // self.num_parts), -(-(part + 1) * num_layers // self.num_parts))

    def open_next(self) -> None:
        """Open the next part: it has arrived."""
        with self._condition:
            self._num_open += 1
            self._condition.notify_all()

    def open_all(self) -> None:
        """Open all parts, so that the computing thread waits for none: nothing more will arrive."""
        with self._condition:
            self._num_open = self.num_parts
            self._condition.notify_all()

    def wait(self, layer: int, num_layers: int, give_up_at: float) -> None:
        """Wait until the layer's part has arrived, or that monotonic time has come, which sets `missed`."""
        part = layer * self.num_parts // num_layers
        if part < self._num_open:
            return
        with self._condition:
            timeout_s = max(0.0, give_up_at - time.monotonic())
            if not self._condition.wait_for(lambda: part < self._num_open, timeout_s):
                self.missed = True
