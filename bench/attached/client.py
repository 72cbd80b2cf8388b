"""A client without an engine: `SidecarTiers` over blocks of this process, driven as a device pool would."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.engine.attached.attachment import Attachment
from kvtier.engine.attached.mapped_slots import MappedSlots
from kvtier.engine.attached.sidecar_tiers import SidecarTiers
from kvtier.engine.attached.wire import VERSION, GroupShape, Hello
from kvtier.store.record import digest
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.lower_tiers import Fetch
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, ExtraKeys
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.named_blocks import blocks_of
from kvtier.tiers.naming.tier import Reason
from kvtier.transfer.host_slab import HostSlab
from kvtier.transfer.lane import Finished, ThreadLane
from kvtier.transfer.transfer_engine import TransferEngine

BLOCK_TOKENS = 16
GROUPS = [FullAttention(BLOCK_TOKENS)]
ATTACH_S = 60.0


class Client:
    """Writes and reads documents through a sidecar: copies, digests and checks as an engine does."""

    def __init__(self, socket: Path, block_bytes: int, namespace: bytes = b"b" * 16) -> None:
        self.memory = MappedSlots(block_bytes)
        self.answered_s = 0.0  # that the leases of the last `read` took
        finished = Finished()
        self._transfers = TransferEngine({}, finished)
        hello = Hello(VERSION, "bench", "bench", namespace, [GroupShape(BLOCK_TOKENS, False, block_bytes)])
        attachment: Attachment[HostSlab] = Attachment(str(socket), hello, [self.memory])
        answers = ThreadLane(finished, "answers")
        self.tiers = SidecarTiers(attachment, GROUPS, [self.memory], self._transfers, answers)
        self.wait(lambda: self.tiers.status.is_indexed)

    def chain(self, document: int, num_blocks: int) -> BlockChain:
        """The names of a document's blocks."""
        chain = BlockChain(BLOCK_TOKENS, ExtraKeys(cache_salt=str(document)))
        chain.extend(range(num_blocks * BLOCK_TOKENS))
        return chain

    def content(self, name: BlockName) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes that a block of that name has."""
        return np.resize(np.frombuffer(name, np.uint8), self.memory.block_bytes)

    def write(self, document: int, num_blocks: int, max_s: float = ATTACH_S) -> int:
        """Copy a document's blocks down; how many found room."""
        names: Sequence[BlockName] = self.chain(document, num_blocks).names[::-1]
        slots: list[int] = []
        give_up_at = time.monotonic() + max_s
        while len(slots) < num_blocks and time.monotonic() < give_up_at:
            slots += self.tiers.reserve(0, num_blocks - len(slots))
            if len(slots) < num_blocks:
                self.turn()
        digests = []
        for name, slot in zip(names, slots, strict=False):
            self.memory.blocks[slot] = self.content(name)
            digests.append(digest(memoryview(self.memory.blocks[slot])))
        if slots:
            rows = [NamedSpan(0, len(slots), list(names[: len(slots)]), None)]
            self.tiers.publish(0, np.array(slots, np.intp), rows, digests, np.zeros(len(slots), np.uint64))
        return len(slots)

    def read(self, document: int, num_blocks: int) -> int:
        """Copy a document's blocks up, checked; how many came."""
        settled = np.zeros(num_blocks, np.bool_)

        def on_fetched(fetch: Fetch, place: int, failure: Reason | None) -> None:
            settled[place] = True

        blocks = blocks_of(self.chain(document, num_blocks), GROUPS[0], np.arange(num_blocks))
        began_at = time.perf_counter()
        fetch = self.tiers.fetch(0, blocks, on_fetched)
        self.wait(lambda: bool(settled.all()))
        self.answered_s = time.perf_counter() - began_at
        num_read = 0
        for place in np.flatnonzero(fetch.slots != ABSENT).tolist():
            copied = self.memory.blocks[int(fetch.slots[place])].copy()
            assert digest(memoryview(copied)) == fetch.digest(place), "other bytes than were written"
            num_read += 1
        fetch.release(np.arange(num_blocks)[::-1])
        return num_read

    def give_back(self, slots: Sequence[int]) -> None:
        """End the leases on slots that were reserved and not filled."""
        self.tiers.abandon(0, np.array(slots, np.intp))

    def lookup(self, chain: BlockChain) -> int:
        """How many of the chain's first blocks are below."""
        return len(self.tiers.find_run(0, chain.names))

    def turn(self) -> None:
        """Wait a moment for the sidecar, and take in what it says."""
        self._transfers.poll(0.01)
        self.tiers.poll()
        self.tiers.pop_lost()

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until *is_so*; TimeoutError after a minute."""
        give_up_at = time.monotonic() + ATTACH_S
        while not is_so():
            if time.monotonic() > give_up_at:
                raise TimeoutError("the sidecar has not answered for a minute")
            self.turn()

    def close(self) -> None:
        """End the session."""
        self.tiers.close()
        self.memory.detach()
