"""AttachedMemory: a memory whose host slots are another process's, and come and go with it."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.transfer.block_memory import BlockMemory

CLOSE_WAIT_S = 10.0  # for memory that is being given up; the process's end frees what has not been

MakeMemory = Callable[[int, int | None], BlockMemory]
"""`make(num_host_slots, file)`: a memory over the same device slots, whose host slots are the beginning of *file*."""


@dataclass(frozen=True)
class PreparedHost:
    """Host slots that are mapped, and not used yet. Whoever prepared them closes them, unless they are attached."""

    memory: BlockMemory

    def close(self) -> None:
        """Give the slots up."""
        self.memory.close()


class AttachedMemory:
    """A `BlockMemory` whose device slots are always there, and whose host slots are those of the segment attached last.

    One thread, the owner of the tiers, attaches and detaches, only while no host slot is leased: so no copy is under
    way. While nothing is attached there is no host slot, and a copy of one raises IndexError.
    """

    def __init__(self, make: MakeMemory) -> None:
        self._make = make
        self._without = make(0, None)
        self._leaving: list[threading.Thread] = []
        self.block_bytes = self._without.block_bytes
        self.num_device_slots = self._without.num_device_slots
        self.num_copiers = self._without.num_copiers
        self.num_layers = self._without.num_layers
        self._use(self._without)

    def prepare(self, file: int, num_bytes: int) -> PreparedHost:
        """Map the first *num_bytes* of a file as host slots, to be attached. Any thread may, and keeps *file*.

        The slots are mapped, and pinned with CUDA, in the background from then on. OSError, with what to do, if that
        cannot be.
        """
        num_host_slots = num_bytes // self.block_bytes
        if not num_host_slots:
            raise OSError(f"host memory of {num_bytes} bytes has no room for a block of {self.block_bytes}; raise it")
        return PreparedHost(self._make(num_host_slots, file))

    def attach(self, prepared: PreparedHost) -> None:
        """Use these host slots from now on, and give up those before."""
        before = self._memory
        self._use(prepared.memory)
        self._give_up(before)

    def detach(self) -> None:
        """Give up the host slots. Does not wait for that: unpinning takes as long as pinning did."""
        before = self._memory
        self._use(self._without)
        self._give_up(before)

    @property
    def prepared_bytes(self) -> int:
        return self._memory.prepared_bytes

    def to_host(self, device_slots: Sequence[int], host_slots: Sequence[int]) -> None:
        self._memory.to_host(device_slots, host_slots)

    def to_device(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        self._memory.to_device(host_slots, device_slots)

    def to_device_layers(self, host_slots: Sequence[int], device_slots: Sequence[int], layers: range) -> None:
        self._memory.to_device_layers(host_slots, device_slots, layers)

    def copy(self, source: int, target: int) -> None:
        self._memory.copy(source, target)

    def host_block(self, slot: int) -> memoryview:
        return self._memory.host_block(slot)

    def host_span(self) -> tuple[int, int, int]:
        return self._memory.host_span()

    def wait_prepared(self, timeout_s: float) -> bool:
        return self._memory.wait_prepared(timeout_s)

    def close(self) -> None:
        self.detach()
        self._without.close()
        for thread in self._leaving:
            thread.join(CLOSE_WAIT_S)

    def _use(self, memory: BlockMemory) -> None:
        self._memory = memory
        self.num_host_slots = memory.num_host_slots

    def _give_up(self, memory: BlockMemory) -> None:
        if memory is self._without:
            return
        self._leaving = [thread for thread in self._leaving if thread.is_alive()]
        self._leaving.append(threading.Thread(target=memory.close, name="kvtier-detach", daemon=True))
        self._leaving[-1].start()
