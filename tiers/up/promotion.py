"""Hit and Promotion: what a look-up found, and its way up to the device."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.tiers.group_tiers import GroupTiers
from kvtier.tiers.lower.lower_tiers import Fetch, Places
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import BlockChain, BlockName
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.transfer.layer_gate import LayerGate

NO_SLOT = -1  # in a table: the group does not need this block, and never reads it
COMPUTED = 255  # in depths: the block is cached, but computed while the rest of a split hit is loaded
if TYPE_CHECKING:  # block -> device slot or NO_SLOT; an array of "i", which numpy and torch read as it is
    Table = array[int]
else:
    Table = array
Tables = list[Table]  # one for each group
WARMEST_FIRST = tuple(Tier)


@dataclass(frozen=True, slots=True)
class PartialHit:
    """A cached block whose first *num_tokens* tokens are the prompt's next ones, after the hit's whole blocks."""

    name: BlockName
    num_tokens: int
    is_used_up: bool = False  # it has no more tokens than these: a request that goes on from it will offer them all


@dataclass(frozen=True, slots=True)
class Misses:
    """Why the tokens after a prefix have to be computed: reasons, each with the token up to which it holds."""

    reasons: tuple[tuple[int, Reason], ...]  # ascending

    def after(self, num_tokens: int) -> dict[Reason, int]:
        """Number of tokens after the first *num_tokens*, by reason."""
        counts: dict[Reason, int] = {}
        for end, reason in self.reasons:
            if end > num_tokens:
                counts[reason] = counts.get(reason, 0) + end - num_tokens
                num_tokens = end
        return counts

    def first(self, num_tokens: int) -> Reason:
        """Why the token after *num_tokens* is missed; LAST_BLOCK if no token is."""
        return next(iter(self.after(num_tokens)), Reason.LAST_BLOCK)

    def cut(self, num_tokens: int, reason: Reason) -> "Misses":
        """The same with *reason* up to *num_tokens*, because of which the prefix became shorter than that."""
        return Misses(((num_tokens, reason), *self.reasons))


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest prefix of a prompt that can be resumed. A value: it leases nothing, and may be out of date soon."""

    chain: BlockChain
    limit: int  # tokens that may hit: whole blocks of all groups, and never the last token
    num_tokens: int  # found of them
    misses: Misses
    partial: PartialHit | None = None
    # For each group the device slots of the blocks it needs, ABSENT for blocks that are not there, and these blocks'
    # places below; as of this `Residency.num_changes`.
    device_slots: Sequence[npt.NDArray[np.int32]] = ()
    below: Sequence[Places] = ()
    as_of: int = -1
    start: int = 0  # of a split hit: tokens before it that are not on the device are computed, not loaded

    @property
    def num_blocks(self) -> int:
        """The hit's length in names of the chain."""
        return self.num_tokens // self.chain.block_size

    @property
    def why_no_more(self) -> Reason:
        """Why the first block was not found that was not; LAST_BLOCK if all were found."""
        return self.misses.first(self.num_tokens)


@dataclass(eq=False, slots=True)
class Promotion:
    """A prefix on its way into device slots. Once `done`, the caller owns one lease on each slot in `tables`.

    `num_tokens` may then be smaller than the hit's: blocks that failed, were corrupt or late are left out, with all
    blocks that need them. *num_copied* tokens follow that were copied out of a cached block; they are in a block of the
    caller's own, which no look-up finds. Of a split hit it brings only what comes after the first *start* tokens.
    """

    chain: BlockChain
    limit: int
    num_tokens: int
    tables: Tables
    depths: bytearray  # [name of the chain] depth of the coldest tier that any group had it in
    misses: Misses
    deadline: float | None = None
    start: int = 0
    num_copied: int = 0
    done: bool = False
    failure: Reason | None = None  # of the last block that did not arrive
    gate: LayerGate | None = None  # if its blocks come layer by layer: computing may begin before it is done
    waiting: set["Upload"] = field(default_factory=set)
    came_at: dict[Tier, float] = field(default_factory=dict)  # when the last block came from each tier, by the clock

    @property
    def num_blocks(self) -> int:
        """The prefix's length in names of the chain."""
        return self.num_tokens // self.chain.block_size

    @property
    def why_no_more(self) -> Reason:
        """Why the first token has to be computed that has to; LAST_BLOCK if it is in the prompt's last block."""
        return self.misses.first(self.num_tokens + self.num_copied)

    @property
    def num_computed(self) -> int:
        """Tokens before *start* that the caller computes although they are cached."""
        return self.depths.count(COMPUTED) * self.chain.block_size

    def take_over(self, earlier: "Promotion") -> None:
        """Take over from *earlier*, which was cut short, where the blocks came from that it brought up."""
        both = zip(self.depths, earlier.depths, strict=False)
        self.depths[: len(earlier.depths)] = bytes(map(max, both))
        self.misses = earlier.misses

    def balance(self, num_prompt_tokens: int) -> TokenBalance:
        """Where the tokens of the request's prompt came from. A block that no group needs counts with the next one."""
        depths, block_size = self.depths[: self.num_blocks], self.chain.block_size
        device, host, disk, remote = (depths.count(tier.depth) * block_size for tier in WARMEST_FIRST)
        after = num_prompt_tokens - self.num_tokens - self.num_copied
        missed = self.misses.after(self.num_tokens + self.num_copied)
        reasons = {Reason.LAST_BLOCK: after - sum(missed.values())}
        if self.num_computed:
            missed[Reason.COST] = missed.get(Reason.COST, 0) + self.num_computed
        for reason, num_tokens in missed.items():
            reasons[reason] = reasons.get(reason, 0) + num_tokens
        return TokenBalance(
            device + self.num_copied, host, disk, remote, after + self.num_computed, reasons, self.num_copied
        )


@dataclass(eq=False, slots=True)
class Upload:
    """One block on its way to the device, for every promotion that waits for it. Its transfer leases *device_slot*."""

    group: GroupTiers
    name: BlockName
    device_slot: int
    source: Tier
    fetch: Fetch  # leases the block in host memory
    place: int  # of the block in the fetch
    host_slot: int | None = None  # once the block is in host memory
    digest: bytes = b""  # of the bytes in the host slot
    waiters: list[tuple[Promotion, int]] = field(default_factory=list)  # with the block's place in the table
