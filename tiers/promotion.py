"""Hit and Promotion: what a look-up found, and its way up to the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.tiers.block_hash import BlockName
from kvtier.tiers.statistics import TokenBalance
from kvtier.tiers.tier import Reason, Tier

NO_SLOT = -1  # in a table: this block is not needed by this group, and never read


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest prefix that can be resumed. A value: nothing is leased, and it may be out of date a step later."""

    names: Sequence[BlockName]  # of all full blocks that may hit
    num_blocks: int  # of them found
    why_no_more: Reason  # for the first block not found; LAST_BLOCK if all were


@dataclass(eq=False, slots=True)
class Promotion:
    """A prefix on its way into device slots. Once `done`, the caller owns one lease on each slot in `tables`.

    `num_blocks` may then be smaller than the hit: blocks that failed, were corrupt or late are left out, with all
    that needs them.
    """

    names: Sequence[BlockName]
    num_blocks: int
    tables: list[list[int]]  # [group][block] -> device slot or NO_SLOT
    tiers: list[Tier]  # [block of the hit], the coldest tier that any group had it in
    why_no_more: Reason
    deadline: float | None = None
    done: bool = False
    waiting: set["Arrival"] = field(default_factory=set)

    def continues(self, earlier: "Promotion") -> None:
        """This one goes on where *earlier* was cut short: what that one brought up counts for where it came from."""
        pairs = zip(self.tiers, earlier.tiers, strict=False)
        self.tiers[: len(earlier.tiers)] = [max(pair, key=lambda tier: tier.depth) for pair in pairs]
        if self.why_no_more is not Reason.LAST_BLOCK:
            self.why_no_more = earlier.why_no_more

    def balance(self, num_prompt_tokens: int, block_size: int) -> TokenBalance:
        """Where the tokens of the request's prompt came from; a block that no group needs counts with the next one."""
        counts = {tier: self.tiers[: self.num_blocks].count(tier) * block_size for tier in Tier}
        recomputed = num_prompt_tokens - self.num_blocks * block_size
        could_hit = (num_prompt_tokens - 1) // block_size * block_size - self.num_blocks * block_size
        reasons = {Reason.LAST_BLOCK: recomputed - could_hit}
        if could_hit:
            reasons[self.why_no_more] = could_hit
        return TokenBalance(counts[Tier.DEVICE], counts[Tier.HOST], counts[Tier.DISK], recomputed, reasons)


@dataclass(eq=False, slots=True)
class Arrival:
    """One block on its way up, shared by every promotion that waits for it; its transfer leases *device_slot*."""

    group_id: int
    name: BlockName
    device_slot: int
    source: Tier
    host_slot: int | None = None  # leased, once there is one
    is_reading: bool = False  # from disk into the host slot, at this moment
    digest: bytes = b""  # of the bytes that arrived in the host slot
    waiters: list[tuple[Promotion, int]] = field(default_factory=list)  # with the block's place in the table
