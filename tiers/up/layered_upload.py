"""LayeredUpload: one promotion's host blocks, copied to the device layer by layer while they are verified."""

from collections.abc import Mapping, Sequence

from kvtier.tiers.up.promotion import Upload
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.layer_gate import LayerGate


class LayeredUpload:
    """A lane runs `copy`, the owner's thread everything else. It is done when all blocks are copied and verified."""

    def __init__(self, uploads: Sequence[Upload], num_parts: int) -> None:
        self.gate = LayerGate(num_parts)
        self._outcomes: dict[Upload, bool | None] = {}
        self._num_uploads = len(uploads)
        self._is_copied: bool | None = None
        self._copies: dict[BlockMemory, tuple[list[int], list[int]]] = {}  # host and device slots
        for upload in uploads:
            assert upload.host_slot is not None, "a block that is not in host memory"
            host_slots, device_slots = self._copies.setdefault(upload.group.memory, ([], []))
            host_slots.append(upload.host_slot)
            device_slots.append(upload.device_slot)

    def copy(self) -> None:
        """Copy part after part of all groups' layers, and open the gate after each."""
        try:
            for part in range(self.gate.num_parts):
                for memory, (host_slots, device_slots) in self._copies.items():
                    layers = self.gate.layers(part, memory.num_layers)
                    if layers:
                        memory.to_device_layers(host_slots, device_slots, layers)
                self.gate.open_next()
        finally:
            self.gate.open_all()

    def on_copied(self, is_copied: bool) -> None:
        """Note that the copies have ended: *is_copied* if without an error."""
        self.gate.open_all()  # a lane that was closed has not begun `copy`
        self._is_copied = is_copied

    def on_verified(self, uploads: Sequence[Upload], outcomes: Sequence[bool | None]) -> None:
        """Note whether these blocks' bytes in host memory are right; None if their verification failed."""
        self._outcomes.update(zip(uploads, outcomes, strict=True))

    def outcomes(self) -> Mapping[Upload, bool | None] | None:
        """For each block whether it has arrived and is right, or None if its copy failed. None until all is known."""
        if self._is_copied is None or len(self._outcomes) < self._num_uploads:
            return None
        if self._is_copied and not self.gate.missed:  # else a step has computed without a layer
            return self._outcomes
        return {upload: None if is_good else is_good for upload, is_good in self._outcomes.items()}
