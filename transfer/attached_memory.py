"""AttachedMemory: a memory whose host slots belong to another process and can be attached and detached."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.delegating_memory import DelegatingMemory

CLOSE_WAIT_S = 10.0  # limit on waiting until detached memory is released; the kernel frees the rest at process exit

MakeMemory = Callable[[int, int | None], BlockMemory]
"""`make(num_host_slots, file)` returns a memory over the same device slots with host slots at the start of *file*."""


@dataclass(frozen=True)
class PreparedHost:
    """Host slots that are mapped but not used yet. The caller of `prepare` must attach or close them."""

    memory: BlockMemory

    def close(self) -> None:
        """Release the slots."""
        self.memory.close()


class AttachedMemory(DelegatingMemory):
    """A `BlockMemory` whose device slots are fixed, and whose host slots can be attached and detached.

    The host slots are in shared memory that belongs to another process. The thread that owns the tiers calls `attach`
    and `detach` only while no host slot is leased, so that no copy is in flight. While nothing is attached, there are
    no host slots, and a copy from or to a host slot raises IndexError.
    """

    def __init__(self, make: MakeMemory) -> None:
        self._make = make
        self._without = make(0, None)
        self._leaving: list[threading.Thread] = []
        super().__init__(self._without)

    def prepare(self, file: int, num_bytes: int) -> PreparedHost:
        """Map the first *num_bytes* of *file* as host slots, to be attached later. May be called from any thread.

        A background thread prepares the slots and, with CUDA, pins them. The caller still has to close the descriptor
        *file*.

        Raises:
            OSError: The file cannot be mapped, or *num_bytes* is too small for a block.
        """
        num_host_slots = num_bytes // self.block_bytes
        if not num_host_slots:
            raise OSError(
                f"host memory of {num_bytes} bytes is too small for one block of {self.block_bytes} bytes; increase it"
            )
        return PreparedHost(self._make(num_host_slots, file))

    def attach(self, prepared: PreparedHost) -> None:
        """Use the host slots of *prepared* from now on, and release the previous ones."""
        before = self.memory
        self._use(prepared.memory)
        self._give_up(before)

    def detach(self) -> None:
        """Release the host slots in the background, because unpinning takes as long as pinning."""
        before = self.memory
        self._use(self._without)
        self._give_up(before)

    def close(self) -> None:
        self.detach()
        self._without.close()
        for thread in self._leaving:
            thread.join(CLOSE_WAIT_S)

    def _use(self, memory: BlockMemory) -> None:
        self.memory = memory
        self.num_host_slots = memory.num_host_slots

    def _give_up(self, memory: BlockMemory) -> None:
        if memory is self._without:
            return
        self._leaving = [thread for thread in self._leaving if thread.is_alive()]
        self._leaving.append(threading.Thread(target=memory.close, name="kvtier-detach", daemon=True))
        self._leaving[-1].start()
