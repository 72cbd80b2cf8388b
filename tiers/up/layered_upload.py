"""LayeredUpload: the host blocks of one promotion, copied up layer by layer while they are being verified."""

from collections.abc import Mapping, Sequence

from kvtier.tiers.up.promotion import Upload
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.layer_gate import LayerGate


class LayeredUpload:
    """`copy` is a lane's work; everything else is the owner's. Done when it has been copied and all was verified."""

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
        """Copy part after part, of all groups, and open the gate for each."""
        try:
            for part in range(self.gate.num_parts):
                for memory, (host_slots, device_slots) in self._copies.items():
                    layers = self.gate.layers(part, memory.num_layers)
                    if layers:
                        memory.to_device_layers(host_slots, device_slots, layers)
                self.gate.open_next()
        finally:
            self.gate.open_all()

    def copied(self, is_copied: bool) -> None:
        """The copies have ended, well or not."""
        self.gate.open_all()  # a lane that closes does not even begin
        self._is_copied = is_copied

    def verified(self, uploads: Sequence[Upload], outcomes: Sequence[bool | None]) -> None:
        """Whether the host's bytes of these are right; None if nobody knows."""
        self._outcomes.update(zip(uploads, outcomes, strict=True))

    def outcomes(self) -> Mapping[Upload, bool | None] | None:
        """For each block whether it arrived and is right, None if its copy failed; None until all that is known."""
        if self._is_copied is None or len(self._outcomes) < self._num_uploads:
            return None
        if self._is_copied and not self.gate.missed:  # who went on without a layer has computed with what was there
            return self._outcomes
        return {upload: None if is_good else is_good for upload, is_good in self._outcomes.items()}
