"""Hit, Promotion and Upload: the result of a lookup, and the state of loading its blocks to the device."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.tiers.lower.lower_tiers import Fetch, Places
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import BlockChain, BlockName
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.residency import GroupTiers
from kvtier.transfer.layer_gate import LayerGate

NO_SLOT = -1  # in a table: no slot for this block, because the attention group does not need it
# In `Promotion.depths`: the block is cached, but is recomputed. This happens in a split hit, whose front is computed
# while the rest is loaded.
COMPUTED = 255
if TYPE_CHECKING:  # block to device slot or NO_SLOT; an array of "i", which numpy and torch read without conversion
    Table = array[int]
else:
    Table = array
Tables = list[Table]  # one for each attention group
WARMEST_FIRST = tuple(Tier)


@dataclass(frozen=True, slots=True)
class PartialHit:
    """A cached block of which only the first *num_tokens* tokens match the prompt.

    In the prompt, these tokens come directly after the hit's full blocks.
    """

    name: BlockName
    num_tokens: int
    is_used_up: bool = False  # whether the block has no further tokens, so that the request's own block replaces it


@dataclass(frozen=True, slots=True)
class Misses:
    """The reasons why the tokens after a cached prefix must be computed.

    Each reason is stored with the token position at which it ends. The next reason holds from there on.
    """

    reasons: tuple[tuple[int, Reason], ...]  # ascending
    # First tokens whose keys and values are cached, although a state or window may be missing. If no group keeps all
    # blocks, these are the first tokens that were computed before.
    num_lasting: int = 0

    def after(self, num_tokens: int) -> dict[Reason, int]:
        """Return the number of tokens after the first *num_tokens*, by reason."""
        counts: dict[Reason, int] = {}
        for end, reason in self.reasons:
            if end > num_tokens:
                counts[reason] = counts.get(reason, 0) + end - num_tokens
                num_tokens = end
        return counts

    def first(self, num_tokens: int) -> Reason:
        """Return why the token after the first *num_tokens* tokens must be computed.

        If no reason is recorded, the result is LAST_BLOCK: the end of a prompt is always computed.
        """
        return next(iter(self.after(num_tokens)), Reason.LAST_BLOCK)

    def cut(self, num_tokens: int, reason: Reason) -> "Misses":
        """Return the misses after the cached prefix was shortened for *reason*. *num_tokens* is its former length."""
        return replace(self, reasons=((num_tokens, reason), *self.reasons))


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest cached prefix of a prompt, as a lookup found it. It leases no blocks, so it may be outdated soon."""

    chain: BlockChain
    limit: int  # maximum tokens of a hit: full blocks of all groups, without the last token
    num_tokens: int  # length of the hit
    misses: Misses
    partial: PartialHit | None = None
    # By group: the device slots of the blocks that the group needs, or ABSENT, and the places of these blocks in the
    # lower tiers. Both are valid while `Residency.num_changes` equals `as_of`.
    device_slots: Sequence[npt.NDArray[np.int32]] = ()
    below: Sequence[Places] = ()
    as_of: int = -1
    # If not 0, the hit is split: tokens before *start* that are not on the device are computed, not loaded.
    start: int = 0

    @property
    def num_blocks(self) -> int:
        """Length of the hit in blocks of the chain."""
        return self.num_tokens // self.chain.block_size


@dataclass(eq=False, slots=True)
class Promotion:
    """The state of loading a hit into device slots. Once `done`, the caller owns one lease on each slot in `tables`.

    `num_tokens` may then be smaller than in the hit, because the prefix ends before a block that failed, was corrupt or
    missed the *deadline*. After the prefix, *num_copied* further tokens were copied from a cached block into a block
    that only the caller uses.

    If *start* is not 0 (a split hit), only the blocks after the first *start* tokens are loaded. Of the first *start*
    tokens, the caller computes those that are not on the device.
    """

    chain: BlockChain
    num_tokens: int
    tables: Tables
    depths: bytearray  # [name of the chain] `Tier.depth` of the coldest tier from which a group gets the block
    misses: Misses
    deadline: float | None = None  # on the cache's clock
    start: int = 0
    num_copied: int = 0
    done: bool = False
    failure: Reason | None = None  # reason of the last block that did not arrive
    gate: LayerGate | None = None  # set if the blocks are loaded layer by layer, so that compute may start early
    waiting: set["Upload"] = field(default_factory=set)  # blocks in flight that the promotion waits for
    came_at: dict[Tier, float] = field(default_factory=dict)  # tier to the arrival time of its last block

    @property
    def num_blocks(self) -> int:
        """Length of the prefix in blocks of the chain."""
        return self.num_tokens // self.chain.block_size

    @property
    def reason_at_end(self) -> Reason:
        """Reason why the prefix that this promotion provides is not longer; LAST_BLOCK if no reason is recorded."""
        return self.misses.first(self.num_tokens + self.num_copied)

    @property
    def num_computed(self) -> int:
        """Number of cached tokens that the request recomputes while the blocks after *start* are loaded."""
        return self.depths.count(COMPUTED) * self.chain.block_size

    def take_over(self, earlier: "Promotion") -> None:
        """Copy from *earlier* which tiers the blocks came from, and why tokens must be computed.

        *earlier* is a promotion of the same request that ended early.
        """
        both = zip(self.depths, earlier.depths, strict=False)
        self.depths[: len(earlier.depths)] = bytes(map(max, both))
        self.misses = earlier.misses

    def balance(self, num_prompt_tokens: int) -> TokenBalance:
        """Return which tiers the prompt's tokens came from, and why the other tokens are computed."""
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
    """The copy of one block to the device, for all promotions that wait for it.

    Its transfer holds a lease on *device_slot*.
    """

    group: GroupTiers
    name: BlockName
    device_slot: int
    source: Tier
    fetch: Fetch  # leases the block in host memory
    place: int  # index of the block in the fetch
    host_slot: int | None = None  # None until the block is in host memory
    digest: bytes = b""  # of the bytes in the host slot
    waiters: list[tuple[Promotion, int]] = field(default_factory=list)  # promotion and block id in its table
