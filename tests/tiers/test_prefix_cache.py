"""The prefix cache end to end over `TieredCache`: the reference's scenarios, and what kvtier has beyond them.

The scenarios are vLLM's. Slots count from 0 and there is no null block: `_` stands for NO_SLOT. Each group has a pool
of its own. Here every token has bytes of its own, which depend on all tokens before it: a hit or a copy that is off by
one token shows.
"""

import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from chaos import World

from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.device.group_slots import GroupSlots
from kvtier.tiers.lower.lower_tiers import ON_DISK
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS, BlockChain, BlockName, ExtraKeys, Lora, MultimodalItem
from kvtier.tiers.naming.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventLog
from kvtier.tiers.naming.groups import (
    AttentionGroup,
    ChunkedLocal,
    FullAttention,
    RecurrentState,
    SlidingWindow,
    longest_hit,
)
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.tiers.up.load_planner import Demand, LoadPlan, LoadPlanner
from kvtier.tiers.up.prefill_speed import PrefillSpeed
from kvtier.tiers.up.promotion import NO_SLOT, Hit, Promotion, Tables
from kvtier.transfer.transfer_engine import Route

BLOCK_SIZE = 16
TOKEN_BYTES = 4
C = [0] * 16 + [1] * 16 + [2] * 16
FULL = (FullAttention(16),)
FULL_AND_TWO_WINDOWS = (FullAttention(16), SlidingWindow(16, 32), SlidingWindow(16, 32))
FULL_32_AND_WINDOW_16 = (FullAttention(32), SlidingWindow(16, 32))
FULL_AND_STATE = (FullAttention(16), RecurrentState(16))
_ = NO_SLOT


def text(seed: int, num_tokens: int) -> list[int]:
    """Tokens of which no two are equal, nor equal to those of another seed."""
    return list(range(1000 * seed, 1000 * seed + num_tokens))


@dataclass(eq=False)
class Reader:
    """A request: what it reads, where its blocks are, and how far it has come."""

    token_ids: list[int]
    chain: BlockChain
    hit: Hit
    junction: int | None
    promotion: Promotion
    tables: Tables = field(default_factory=list)
    num_computed: int = 0
    num_committed: int = 0
    num_prompt_tokens: int = 0

    @property
    def tokens(self) -> TokenBalance:
        return self.promotion.balance(self.num_prompt_tokens)

    def slots(self, group_id: int = 0) -> list[int]:
        return self.tables[group_id].tolist()


class Desk(World):
    """Where readers come and go: a world in which every token's bytes are known and every event is kept."""

    def __init__(
        self,
        groups: Sequence[AttentionGroup] = FULL,
        num_slots: int = 10,
        num_host_slots: int = 0,
        store: MemoryStore | None = None,
        **options: object,
    ) -> None:
        self.log = EventLog()
        self.written: dict[tuple[int, BlockName], np.ndarray] = {}  # by group
        self.origin: dict[BlockName, tuple[bytes, list[int]]] = {}  # what each block continues, and its tokens
        sizes = [group.block_size * TOKEN_BYTES for group in groups]
        rng = random.Random(1)
        super().__init__(groups, sizes, num_slots, num_host_slots, store, rng, events=self.log, **options)
        self.pools: list[BlockPool] = [group.pool for group in self.cache.residency.groups]

    def chain_of(self, token_ids: list[int], extra: ExtraKeys = NO_EXTRA_KEYS) -> BlockChain:
        chain = BlockChain(self.cache.block_size, extra)
        chain.extend(token_ids)
        return chain

    def bytes_of(self, group_id: int, name: BlockName) -> np.ndarray:
        return self.written[group_id, name]

    def tokens_in(self, group_id: int, slot: int, num_tokens: int) -> np.ndarray:
        """The bytes of the first tokens in a device slot, [num_tokens, TOKEN_BYTES]."""
        return self.device[group_id][slot].reshape(-1, TOKEN_BYTES)[:num_tokens].copy()

    def lookup(self, token_ids: list[int], extra: ExtraKeys = NO_EXTRA_KEYS) -> Hit:
        return self.cache.lookup(self.chain_of(token_ids, extra), len(token_ids))

    def arrive(self, token_ids: Sequence[int], extra: ExtraKeys = NO_EXTRA_KEYS, reads_cache: bool = True) -> Reader:
        """A request comes; its promotion may still be under way."""
        token_ids = list(token_ids)
        chain = self.chain_of(token_ids, extra)
        find = self.cache.lookup if reads_cache else self.cache.lookups.no_hit
        hit = find(chain, len(token_ids))
        junction = self.cache.lookups.junction(hit)
        promotion = self.cache.promote(hit)
        self.remember(chain, token_ids)
        return Reader(token_ids, chain, hit, junction, promotion, num_prompt_tokens=len(token_ids))

    def enter(
        self,
        token_ids: Sequence[int],
        extra: ExtraKeys = NO_EXTRA_KEYS,
        reads_cache: bool = True,
        stops: Iterable[int] = (),
    ) -> Reader:
        """A request comes, gets its hit and computes the rest, in chunks that end at *stops*."""
        reader = self.arrive(token_ids, extra, reads_cache)
        self.settle()
        for end in (*stops, len(token_ids)):
            self.run(reader, end)
        return reader

    def run(self, reader: Reader, end: int) -> None:
        """Compute up to token *end*, as a scheduler and a model do."""
        cache, tables = self.cache, reader.tables
        if not tables:
            assert reader.promotion.done
            reader.tables = tables = reader.promotion.tables
            reader.num_committed = reader.promotion.num_tokens
            reader.num_computed = reader.promotion.num_tokens + reader.promotion.num_copied
        self.check_bytes(reader)
        reader.chain.extend(reader.token_ids)
        self.remember(reader.chain, reader.token_ids)

        cache.forget_read(tables, reader.num_computed)
        missing = [-(-end // group.block_size) - len(table) for group, table in zip(cache.groups, tables, strict=True)]
        # A model with states computes only those at the ends of its chunks.
        skipped = [
            max(0, num - 1) * isinstance(group, RecurrentState)
            for num, group in zip(missing, cache.groups, strict=True)
        ]
        slots = cache.allocate([num - left_out for num, left_out in zip(missing, skipped, strict=True)])
        assert slots is not None, f"{missing} slots wanted, {cache.free_slots()} free"
        for table, left_out, new in zip(tables, skipped, slots, strict=True):
            table.extend([NO_SLOT] * left_out)
            table.extend(new)

        for group_id, (group, table) in enumerate(zip(cache.groups, tables, strict=True)):
            kv = kv_bytes(group_id, reader.token_ids[:end], reader.chain.extra)
            for place in range(reader.num_computed, end):
                if (slot := table[place // group.block_size]) != NO_SLOT:
                    offset = place % group.block_size * TOKEN_BYTES
                    self.device[group_id][slot, offset : offset + TOKEN_BYTES] = kv[place]
        boundaries = [reader.num_prompt_tokens - 1, *([] if reader.junction is None else [reader.junction])]
        cache.commit(tables, reader.chain, reader.num_committed, end, boundaries)
        reader.num_computed = reader.num_committed = end
        self.check()

    def answer(self, reader: Reader, token_ids: Sequence[int]) -> None:
        """Compute these tokens, one by one, after what was read."""
        for token_id in token_ids:
            reader.token_ids.append(token_id)
            self.run(reader, len(reader.token_ids))

    def leave(self, *readers: Reader) -> None:
        for reader in readers:
            tail, start = reader.chain.tail_name(reader.num_computed), reader.num_computed // self.cache.block_size
            self.tails.add(tail)
            token_ids = reader.token_ids[start * self.cache.block_size : reader.num_computed]
            self.origin[tail] = reader.chain.continued_key(start), token_ids
            self.cache.commit_tail(reader.tables, reader.chain, reader.num_computed)
            self.cache.release(reader.tables)
            self.check()

    def remember(self, chain: BlockChain, token_ids: list[int]) -> None:
        """What the bytes of the chain's blocks have to be, wherever they are."""
        for group_id, group in enumerate(self.cache.groups):
            names = chain.names_of(group.block_size, range(len(token_ids) // group.block_size))
            if names and (group_id, names[-1]) not in self.written:
                kv = kv_bytes(group_id, token_ids, chain.extra)
                for i, name in enumerate(names):
                    block = token_ids[i * group.block_size : (i + 1) * group.block_size]
                    self.origin[name] = chain.continued_key(i), block
                    self.written[group_id, name] = kv[i * group.block_size : (i + 1) * group.block_size].ravel()

    def check_bytes(self, reader: Reader) -> None:
        """Everything that the next token reads is in the reader's slots."""
        for group_id, (group, table) in enumerate(zip(self.cache.groups, reader.tables, strict=True)):
            kv = kv_bytes(group_id, reader.token_ids[: reader.num_computed], reader.chain.extra)
            for block_id in range(group.first_needed(reader.num_computed), -(-reader.num_computed // group.block_size)):
                expected = kv[block_id * group.block_size : (block_id + 1) * group.block_size]
                found = self.tokens_in(group_id, table[block_id], len(expected))
                assert (found == expected).all(), f"group {group_id}: wrong bytes in block {block_id}"

    def queue(self, group_id: int = 0) -> list[int]:
        """The free slots in the order in which they would be given out; nothing changes."""
        return self.pools[group_id].blank_slots() + self.pools[group_id].cached_slots()

    def holders(self, reader: Reader, group_id: int = 0) -> list[int | None]:
        """For each full block of the request the device slot in which other requests find it."""
        size = self.cache.groups[group_id].block_size
        names = reader.chain.names_of(size, range(len(reader.token_ids) // size))
        return [self.pools[group_id].find(name) for name in names]

    def books(self) -> object:
        """All that can be seen of the device."""
        return [
            (
                self.queue(group_id),
                pool.num_leases,
                [(pool.name(slot), pool.is_free(slot)) for slot in range(pool.num_slots)],
            )
            for group_id, pool in enumerate(self.pools)
        ]

    def forget(self, tier: Tier, reader: Reader, *blocks: tuple[int, int]) -> None:
        """Evict single blocks, as (group, number), in one tier."""
        device = [group.slots for group in self.cache.residency.groups]
        slots = device if tier is Tier.DEVICE else self.host
        assert slots is not None
        for group_id, block_id in blocks:
            size = self.cache.groups[group_id].block_size
            slot = slots[group_id].pool.find(reader.chain.names_of(size, range(block_id, block_id + 1))[0])
            assert slot is not None, "the block was not there"
            slots[group_id].evict([slot], EvictionCause.ROOM)

    def spill_all(self) -> None:
        """Copy down until nothing more wants to go."""
        for _ in range(40):
            self.cache.spill()
            self.settle()

    def flush(self) -> None:
        def progress(num_left: int) -> None:
            self.clock.now += 0.01
            for lane in self.lanes.values():
                lane.stir(1.0)

        assert self.cache.drain.flush(10, progress) == 0


def kv_bytes(group_id: int, token_ids: Sequence[int], extra: ExtraKeys) -> np.ndarray:
    """What a model would compute for each token, [num_tokens, TOKEN_BYTES]: it depends on all before."""
    state = zlib.crc32(f"{group_id} {extra.lora} {extra.cache_salt}".encode())
    rows = []
    for place, token_id in enumerate(token_ids):
        seen = [item.identifier for item in extra.multimodal if item.offset <= place < item.offset + item.num_tokens]
        state = zlib.crc32(f"{token_id} {seen}".encode(), state)
        rows.append(state)
    return np.array(rows, "<u4").view(np.uint8).reshape(-1, TOKEN_BYTES)


def on_disk(token_ids: list[int], groups: Sequence[AttentionGroup] = FULL) -> MemoryStore:
    """A disk with the blocks of a prompt, as an earlier process left it."""
    store = MemoryStore(1 << 24)
    desk = Desk(groups, num_slots=40, num_host_slots=80, store=store)
    desk.leave(desk.enter(token_ids))
    desk.flush()
    return store


def reference(num_slots: int = 10) -> Desk:
    """One group, and nothing that vLLM has not."""
    return Desk(num_slots=num_slots, partial_blocks=False)


# --- one group of full attention: slots, order, leases


def test_a_cold_prompt_takes_the_first_slots_and_its_last_block_has_no_name() -> None:  # S1
    desk = reference()

    reader = desk.enter(C + [3] * 7)

    assert reader.promotion.num_tokens == 0
    assert reader.slots() == [0, 1, 2, 3]
    assert desk.holders(reader) == [0, 1, 2]
    assert desk.pools[0].num_named == 3
    assert desk.pools[0].num_leases == 4
    assert desk.queue() == [4, 5, 6, 7, 8, 9]


def test_a_prefix_in_use_is_shared_and_stays_until_the_last_reader_has_left() -> None:  # S2
    desk = reference()
    first = desk.enter(C + [3] * 7)

    second = desk.enter(C + [3] * 5)

    assert second.promotion.num_tokens == 48
    assert second.slots() == [0, 1, 2, 4]
    assert desk.pools[0].num_leases == 8
    assert desk.cache.free_slots() == [5]  # half of them
    desk.leave(first)
    assert [desk.pools[0].is_free(slot) for slot in range(5)] == [False, False, False, True, False]
    desk.leave(second)
    assert desk.cache.free_slots() == [10]


def test_what_has_no_name_is_reused_first_and_a_prefix_is_evicted_from_its_tail() -> None:  # S3
    desk = reference()
    first, second = desk.enter(C + [3] * 7), desk.enter(C + [3] * 5)

    desk.leave(first, second)

    assert desk.queue() == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]


def test_a_hit_takes_freed_blocks_out_of_the_queue_and_leaving_puts_them_back() -> None:  # S4
    desk = reference()
    desk.leave(desk.enter(C + [3] * 7), desk.enter(C + [3] * 5))

    third = desk.enter(C + [3] * 6)

    # Both came before either left, so the first to leave freed slot 3, the second slot 4.
    assert third.promotion.num_tokens == 48
    assert third.slots() == [0, 1, 2, 4]
    assert desk.queue() == [3, 5, 6, 7, 8, 9]
    desk.leave(third)
    assert desk.queue() == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]


def test_an_unrelated_prompt_gets_the_slots_in_the_order_of_eviction() -> None:  # S5
    desk = reference()
    first = desk.enter(C + [3] * 7)
    desk.leave(first, desk.enter(C + [3] * 5))
    order = desk.queue()

    other = desk.enter(text(1, 160))

    assert other.promotion.num_tokens == 0
    assert other.slots() == order
    assert desk.queue() == []
    assert desk.holders(first) == [None, None, None]


def test_the_prompt_that_was_left_first_is_evicted_first() -> None:  # S6
    desk = reference()
    first, second = desk.enter(text(1, 87)), desk.enter(text(2, 48))
    assert (first.slots(), second.slots()) == ([0, 1, 2, 3, 4, 5], [6, 7, 8])
    desk.leave(first)
    assert desk.queue() == [5, 9, 4, 3, 2, 1, 0]
    desk.leave(second)
    assert desk.queue() == [5, 9, 4, 3, 2, 1, 0, 8, 7, 6]

    third = desk.enter(text(1, 35))

    assert third.promotion.num_tokens == 32
    assert third.slots() == [0, 1, 5]
    assert desk.queue() == [9, 4, 3, 2, 8, 7, 6]


def test_of_the_same_prompt_without_partial_blocks_the_last_block_is_computed_again() -> None:  # S7
    desk = reference()
    desk.leave(desk.enter(text(1, 48)))
    assert desk.queue() == [3, 4, 5, 6, 7, 8, 9, 2, 1, 0]

    again = desk.arrive(text(1, 48))
    one_more = desk.lookup([*text(1, 48), 7])

    assert again.promotion.num_tokens == 32
    assert again.tokens.recomputed == 16
    assert one_more.num_tokens == 48


def test_a_block_computed_twice_stays_where_it_was_and_its_second_slot_is_blank() -> None:  # S7, S8: unlike vLLM
    desk = reference()
    first = desk.enter(text(1, 48))
    desk.leave(first)

    again = desk.enter(text(1, 48))

    assert again.slots() == [0, 1, 2]  # the last one was computed into 3
    assert desk.holders(first) == [0, 1, 2]
    assert desk.pools[0].num_named == 3
    assert desk.queue() == [3, 4, 5, 6, 7, 8, 9]


def test_a_hit_is_not_evicted_for_the_rest_of_its_own_prompt() -> None:  # S9
    desk = reference(num_slots=2)
    one, other = desk.enter(text(1, 16)), desk.enter(text(2, 16))
    desk.leave(one, other)
    assert desk.queue() == [0, 1]

    both = desk.enter(text(1, 32))

    assert both.promotion.num_tokens == 16
    assert both.slots() == [0, 1]
    assert desk.holders(other) == [None]


def test_an_allocation_that_fails_changes_nothing() -> None:  # S10
    desk = Desk(FULL_AND_TWO_WINDOWS, partial_blocks=False)
    desk.enter(C)
    desk.leave(desk.enter(C * 2))
    desk.enter([7] * 32)
    assert desk.cache.free_slots() == [5, 5, 5]
    desk.log.take()
    before = desk.books()

    assert desk.cache.allocate([6, 6, 6]) is None
    assert desk.cache.allocate([1, 1, 6]) is None

    assert desk.books() == before
    assert desk.log.take() == []
    assert desk.cache.allocate([5, 5, 5]) is not None


def test_a_hit_whose_rest_does_not_fit_can_be_given_back_and_everything_is_still_found() -> None:  # S10
    desk = reference()
    desk.enter(C)
    desk.leave(desk.enter(C * 2))
    desk.enter([7] * 32)

    late = desk.arrive(C * 3)
    rest = desk.cache.allocate([3])

    assert late.promotion.tables[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert rest is None
    desk.cache.release(late.promotion.tables)
    desk.check()
    assert [desk.pools[0].is_free(slot) for slot in range(6)] == [False, False, False, True, True, True]
    assert desk.lookup(C * 3).num_tokens == 96


def test_what_nobody_commits_is_not_found_and_its_slots_come_back_last_in_first_out() -> None:  # S11: caching disabled
    desk = Desk((FullAttention(4),), num_slots=4)
    (table,) = desk.cache.allocate([3]) or []

    desk.cache.release([table])

    assert table.tolist() == [0, 1, 2]
    assert desk.lookup(text(1, 13)).num_tokens == 0
    assert desk.queue() == [0, 1, 2, 3]
    assert desk.log.take() == []


def test_a_reset_is_refused_while_a_block_is_leased_and_then_forgets_all() -> None:  # S12
    desk = reference()
    reader = desk.enter(C + [3] * 7)
    desk.log.take()

    refused = desk.cache.reset()

    assert not refused
    assert desk.log.take() == []
    assert desk.lookup([*C, 4]).num_tokens == 48
    desk.leave(reader)
    order = desk.queue()
    assert desk.cache.reset()
    desk.check()
    assert desk.log.take() == [AllBlocksCleared()]
    assert order == [3, 4, 5, 6, 7, 8, 9, 2, 1, 0]
    assert desk.queue() == list(range(10)), "all slots are blank, and taken in ascending order"
    assert [desk.pools[0].name(slot) for slot in range(10)] == [None] * 10
    assert desk.lookup([*C, 4]).num_tokens == 0


def test_after_a_reset_no_part_of_a_block_is_shared() -> None:  # S12
    desk = Desk()
    desk.leave(desk.enter(text(1, 40)))

    assert desk.cache.reset()

    assert desk.lookup(text(1, 40)).partial is None


def test_a_block_in_use_that_is_evicted_stays_its_reader_s_and_is_found_by_nobody() -> None:  # S13
    desk = reference()
    reader = desk.enter(C)
    desk.log.take()

    desk.evict_blocks([reader.chain.names[1]])

    assert desk.log.take() == [BlockRemoved(Tier.DEVICE, 0, [reader.chain.names[1]])]
    assert desk.lookup([*C, 9]).num_tokens == 16
    assert desk.pools[0].num_leases == 3
    desk.check_bytes(reader)
    desk.leave(reader)
    assert desk.queue() == [1, 3, 4, 5, 6, 7, 8, 9, 2, 0]


def test_an_evicted_block_is_not_even_shared_in_part() -> None:  # S13
    desk = Desk()
    reader = desk.enter(C)

    desk.evict_blocks([reader.chain.names[1]])

    assert desk.lookup(C[:30]).partial is None


def test_blocks_are_evicted_from_host_memory_too() -> None:  # S13
    desk = Desk(num_slots=8, num_host_slots=20)
    reader = desk.enter(C)
    desk.leave(reader)
    desk.spill_all()
    desk.forget(Tier.DEVICE, reader, (0, 2))
    assert desk.lookup([*C, 9]).num_tokens == 48

    desk.evict_blocks(reader.chain.names[1:])

    assert desk.cache.lookups.where(reader.chain) == [Tier.DEVICE, None, None]


def test_a_block_that_two_have_computed_is_gone_with_its_only_slot() -> None:  # S14: there are no duplicates
    desk = reference()
    first, second = desk.enter(C), desk.enter(C, reads_cache=False)

    desk.evict_blocks(first.chain.names[:1])

    assert desk.holders(first) == desk.holders(second) == [None, 1, 2]
    assert desk.pools[0].num_named == 2


def test_one_that_does_not_read_the_cache_computes_everything_and_goes_on_with_what_was_there() -> None:  # S16
    desk = reference()
    first = desk.enter(C)

    second = desk.arrive(C, reads_cache=False)
    desk.settle()
    desk.run(second, 40)
    while_computing = second.slots()
    desk.run(second, 48)

    assert second.promotion.num_tokens == 0
    assert second.tokens.reasons == {Reason.SKIPPED: 32, Reason.LAST_BLOCK: 16}
    assert while_computing == [0, 1, 5]  # computed into 3, 4 and 5
    assert second.slots() == first.slots() == [0, 1, 2]
    assert desk.pools[0].num_leases == 6
    desk.leave(first, second)
    assert desk.queue() == [5, 4, 3, 6, 7, 8, 9, 2, 1, 0]


def test_one_that_does_not_read_the_cache_copies_no_part_of_a_block_either() -> None:  # S16
    desk = Desk()
    desk.leave(desk.enter(text(1, 48)))

    reader = desk.enter(text(1, 40), reads_cache=False)

    assert (reader.tokens.device, reader.tokens.copied, reader.tokens.recomputed) == (0, 0, 40)


def test_of_a_hit_only_as_much_is_taken_as_is_wanted_and_what_else_was_found_has_its_reason() -> None:
    desk = Desk()
    desk.leave(desk.enter(text(1, 48)))
    prompt = [*text(1, 40), *text(2, 40)]
    found = desk.lookup(prompt)

    taken = {limit: desk.cache.plans.limit_hit(found, limit, Reason.SCORED) for limit in (0, 20, 40)}

    assert (found.num_tokens, found.partial.num_tokens) == (32, 8)
    assert {limit: hit.num_tokens for limit, hit in taken.items()} == {0: 0, 20: 16, 40: 32}
    assert [hit.partial for hit in taken.values()] == [None, None, found.partial]
    whys = [hit.misses.after(hit.num_tokens) for hit in taken.values()]
    assert whys[:2] == [{Reason.SCORED: 40, Reason.NEVER_SEEN: 24}, {Reason.SCORED: 24, Reason.NEVER_SEEN: 24}]
    assert whys[2] == {Reason.NEVER_SEEN: 32}


def test_what_one_computed_who_does_not_read_the_cache_is_found_by_others() -> None:  # S16
    desk = Desk()

    reader = desk.enter(text(1, 48), reads_cache=False)

    assert desk.holders(reader) == [0, 1, 2]
    assert desk.lookup([*text(1, 48), 7]).num_tokens == 48


# --- what was generated


def test_the_next_turn_of_a_chat_computes_nothing_but_its_own_new_tokens() -> None:
    desk = Desk(num_slots=20)
    chat = desk.enter(text(1, 43))
    desk.answer(chat, text(2, 30))
    desk.leave(chat)

    turn = desk.enter([*chat.token_ids, *text(3, 11)])

    assert turn.promotion.num_tokens == 64
    assert turn.tokens.copied == 9  # of the answer's last block, which was not full
    assert turn.tokens.recomputed == 11


def test_the_last_token_of_an_answer_that_was_never_computed_is_computed_in_the_next_turn() -> None:
    desk = Desk(num_slots=20)
    chat = desk.enter(text(1, 43))
    desk.answer(chat, text(2, 30))
    desk.leave(chat)

    turn = desk.enter([*chat.token_ids, 77, *text(3, 11)])

    assert turn.tokens.recomputed == 12


def test_without_partial_blocks_the_next_turn_finds_the_full_blocks() -> None:
    desk = Desk(num_slots=20, partial_blocks=False)
    chat = desk.enter(text(1, 43))
    desk.answer(chat, text(2, 30))
    desk.leave(chat)

    turn = desk.enter([*chat.token_ids, *text(3, 11)])

    assert (turn.promotion.num_tokens, turn.tokens.recomputed) == (64, 9 + 11)


def test_another_answer_to_the_same_question_shares_the_question_to_the_token() -> None:
    desk = Desk(num_slots=20)
    first = desk.enter(text(1, 43))
    desk.answer(first, text(2, 30))
    desk.leave(first)

    second = desk.enter(text(1, 43))
    desk.answer(second, text(3, 30))

    assert (second.promotion.num_tokens, second.tokens.copied, second.tokens.recomputed) == (32, 10, 1)
    assert desk.lookup([*first.token_ids, 7]).num_tokens == 64
    assert desk.lookup([*second.token_ids, 7]).num_tokens == 64


def test_an_answer_grows_into_one_new_slot_for_each_full_block() -> None:  # S17
    desk = Desk()
    reader = desk.enter(C + [3] * 7)

    desk.answer(reader, text(1, 4))
    after_four = reader.slots(), desk.holders(reader)
    desk.answer(reader, text(2, 19))

    assert after_four == ([0, 1, 2, 3], [0, 1, 2])
    assert reader.slots() == [0, 1, 2, 3, 4]
    assert desk.holders(reader) == [0, 1, 2, 3]  # 78 tokens: the newest block is not full


# --- parts of blocks


def test_a_prompt_that_diverges_inside_a_block_gets_exactly_the_shared_tokens() -> None:
    desk = Desk()
    first = desk.enter(text(1, 48))

    second = desk.arrive(text(1, 37) + text(2, 20))

    assert second.promotion.done
    assert (second.promotion.num_tokens, second.promotion.num_copied) == (32, 5)
    assert second.promotion.tables[0].tolist() == [0, 1, 3]
    assert (desk.tokens_in(0, 3, 5) == desk.tokens_in(0, 2, 5)).all()
    desk.run(second, 57)  # which looks at all bytes
    assert desk.holders(first) == [0, 1, 2]
    assert desk.holders(second) == [0, 1, 3]


def test_copied_tokens_come_from_the_device_and_are_counted_apart() -> None:
    desk = Desk()
    desk.enter(text(1, 48))

    tokens = desk.enter(text(1, 37) + text(2, 20)).tokens

    assert (tokens.device, tokens.copied, tokens.recomputed) == (37, 5, 20)
    assert tokens.reasons == {Reason.NEVER_SEEN: 48 - 37, Reason.LAST_BLOCK: 9}
    assert tokens.num_tokens == 57


def test_counts_of_copied_tokens_add_up_over_requests() -> None:
    desk = Desk(num_slots=20)
    desk.enter(text(1, 48))

    both = desk.enter([*text(1, 37), 7]).tokens.plus(desk.enter([*text(1, 20), 8]).tokens)

    assert (both.device, both.copied, both.recomputed) == (37 + 20, 5 + 4, 2)


@pytest.mark.parametrize("num_shared", [1, 15])
def test_a_prompt_that_diverges_in_its_first_block_shares_its_first_tokens(num_shared: int) -> None:
    desk = Desk()
    desk.leave(desk.enter(text(1, 48)))

    reader = desk.enter(text(1, num_shared) + text(2, 30))

    assert (reader.promotion.num_tokens, reader.tokens.copied) == (0, num_shared)


def test_a_prompt_that_shares_no_token_of_a_block_gets_no_copy() -> None:
    desk = Desk()
    desk.leave(desk.enter(text(1, 48)))

    reader = desk.enter(text(1, 32) + text(2, 10))

    assert (reader.promotion.num_tokens, reader.tokens.copied) == (32, 0)


def test_a_shorter_prompt_ends_inside_a_cached_block_and_computes_one_token() -> None:
    desk = Desk()
    desk.leave(desk.enter(text(1, 48)))

    reader = desk.enter(text(1, 40))

    assert (reader.promotion.num_tokens, reader.tokens.copied, reader.tokens.recomputed) == (32, 7, 1)


def test_the_same_prompt_that_ends_with_a_block_costs_one_token() -> None:  # S7: unlike vLLM
    desk = Desk()
    first = desk.enter(text(1, 48))
    desk.leave(first)

    again = desk.arrive(text(1, 48))

    assert (again.promotion.num_tokens, again.tokens.copied, again.tokens.recomputed) == (32, 15, 1)
    desk.run(again, 48)
    assert again.slots() == [0, 1, 2]  # computed into a copy of 2, then 2 itself was adopted
    assert desk.queue() == [3, 4, 5, 6, 7, 8, 9]


def test_a_prompt_of_one_token_copies_nothing() -> None:
    desk = Desk()
    desk.leave(desk.enter(text(1, 48)))

    assert desk.enter(text(1, 1)).tokens.copied == 0


def test_of_several_blocks_that_go_on_differently_the_one_that_shares_most_is_copied() -> None:
    desk = Desk(num_slots=20)
    for num_shared in (3, 9, 6):
        desk.leave(desk.enter(text(1, 16 + num_shared) + text(2 + num_shared, 20)))

    reader = desk.enter(text(1, 40))

    assert (reader.promotion.num_tokens, reader.tokens.copied) == (16, 9)


def test_two_that_read_one_block_write_into_copies_of_their_own() -> None:
    desk = Desk()
    source = desk.enter(text(1, 16))
    before = desk.tokens_in(0, source.slots()[0], 16)

    one, two = desk.enter(text(1, 9) + text(2, 20)), desk.enter(text(1, 12) + text(3, 20))

    assert (one.tokens.copied, two.tokens.copied) == (9, 12)
    assert len({source.slots()[0], one.slots()[0], two.slots()[0]}) == 3
    assert (desk.tokens_in(0, source.slots()[0], 16) == before).all()
    for reader in (source, one, two):
        desk.check_bytes(reader)


def test_nobody_finds_a_copy_before_its_block_is_full() -> None:
    desk = Desk()
    desk.enter(text(1, 48))

    second = desk.arrive(text(1, 37) + text(2, 20))

    assert desk.pools[0].name(second.promotion.tables[0][2]) is None
    desk.run(second, 47)
    assert desk.pools[0].name(second.slots()[2]) is None
    desk.run(second, 48)
    assert desk.pools[0].name(second.slots()[2]) == second.chain.names[2]


def test_a_block_that_was_copied_from_is_as_old_as_before() -> None:  # S6: a few words in common make it no newer
    desk = Desk()
    first, second = desk.enter(text(1, 80)), desk.enter(text(2, 48))
    desk.leave(first, second)
    assert desk.queue() == [8, 9, 4, 3, 2, 1, 0, 7, 6, 5]

    third = desk.enter(text(1, 35))

    assert third.slots() == [0, 1, 8]
    assert desk.queue() == [9, 4, 3, 2, 7, 6, 5]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (ExtraKeys(cache_salt="me"), ExtraKeys(cache_salt="them")),
        (NO_EXTRA_KEYS, ExtraKeys(cache_salt="them")),
        (ExtraKeys(cache_salt="me"), NO_EXTRA_KEYS),
        (ExtraKeys(lora=Lora("a", "/a")), ExtraKeys(lora=Lora("b", "/a"))),
        (ExtraKeys(lora=Lora("a", "/a")), ExtraKeys(lora=Lora("a", "/b"))),
        (NO_EXTRA_KEYS, ExtraKeys(lora=Lora("b", "/b"))),
        (ExtraKeys(multimodal=(MultimodalItem("cat", 3, 4),)), ExtraKeys(multimodal=(MultimodalItem("dog", 3, 4),))),
        (NO_EXTRA_KEYS, ExtraKeys(multimodal=(MultimodalItem("dog", 3, 4),))),
    ],
)
@pytest.mark.parametrize("num_tokens", [9, 40])
def test_tenants_adapters_and_images_share_no_part_of_a_block(
    mine: ExtraKeys, theirs: ExtraKeys, num_tokens: int
) -> None:
    desk = Desk()
    desk.leave(desk.enter(text(1, num_tokens), mine))

    strangers = desk.enter(text(1, num_tokens), theirs)
    own = desk.enter(text(1, num_tokens), mine)

    assert strangers.tokens.device == 0
    assert own.tokens.device == num_tokens - 1


def test_blocks_after_an_image_share_parts_only_behind_the_same_image() -> None:
    desk = Desk(num_slots=20)
    cat, dog = (ExtraKeys(multimodal=(MultimodalItem(name, 3, 4),)) for name in ("cat", "dog"))
    desk.leave(desk.enter(text(1, 48), cat))

    assert desk.enter(text(1, 40), cat).tokens.device == 39
    assert desk.enter(text(1, 40), dog).tokens.device == 0


def test_the_bytes_of_a_prompt_are_counted_in_the_warmest_tier_of_each_block() -> None:
    desk = Desk(FULL_AND_STATE, num_slots=20, num_host_slots=40)
    reader = desk.enter(text(1, 96), stops=[32])  # six blocks, and states at blocks 1 and 5
    desk.leave(reader)
    desk.spill_all()
    desk.forget(Tier.DEVICE, reader, (0, 4), (0, 5), (1, 5))

    found = desk.cache.lookups.bytes_in(reader.chain)

    block = 16 * TOKEN_BYTES
    assert found == {Tier.DEVICE: 5 * block, Tier.HOST: 3 * block, Tier.DISK: 0, Tier.REMOTE: 0}


class CountingChain(BlockChain):
    """A chain that counts for how many ranges its names are asked."""

    num_ranges = 0

    def names_of(self, block_size: int, blocks: range) -> list[BlockName]:
        self.num_ranges += 1
        return super().names_of(block_size, blocks)


@pytest.mark.parametrize("groups", [FULL_AND_STATE, (FullAttention(16), SlidingWindow(16, 18))])
def test_blocks_of_a_group_that_forgets_are_looked_up_many_at_once(groups: Sequence[AttentionGroup]) -> None:
    """A hit of ten blocks is found in few lookups. Of the later blocks, the group has none or only every second one."""
    desk = Desk(groups, num_slots=602)
    token_ids = text(1, 602 * 16)
    reader = desk.enter(token_ids, stops=[160])
    desk.leave(reader)
    is_window = isinstance(groups[1], SlidingWindow)
    desk.forget(Tier.DEVICE, reader, *((1, block) for block in (range(10, 602, 2) if is_window else [601])))
    chain = CountingChain(16)
    chain.extend(token_ids)

    hit = desk.cache.lookup(chain, len(token_ids))

    assert hit.num_tokens == 160
    assert chain.num_ranges <= 8


def test_partial_blocks_can_be_turned_off() -> None:
    desk = Desk(partial_blocks=False)
    desk.leave(desk.enter(text(1, 48)))

    reader = desk.enter(text(1, 40))

    assert (reader.promotion.num_tokens, reader.tokens.copied, reader.tokens.recomputed) == (32, 0, 8)


@pytest.mark.parametrize("groups", [FULL_AND_STATE, (RecurrentState(16),), FULL_32_AND_WINDOW_16])
def test_states_and_blocks_of_different_sizes_are_never_shared_in_part(groups: Sequence[AttentionGroup]) -> None:
    desk = Desk(groups)
    desk.leave(desk.enter(text(1, 40), stops=[32]))

    reader = desk.enter(text(1, 39), stops=[32])

    assert (reader.promotion.num_tokens, reader.tokens.copied) == (32, 0)


@pytest.mark.parametrize("groups", [FULL_AND_TWO_WINDOWS, (SlidingWindow(16, 32),), (ChunkedLocal(16, 64),)])
def test_a_part_is_copied_in_every_group(groups: Sequence[AttentionGroup]) -> None:
    desk = Desk(groups)
    source = desk.enter(text(1, 48))

    reader = desk.enter(text(1, 37) + text(2, 20))

    assert (reader.promotion.num_tokens, reader.tokens.copied) == (32, 5)
    for group_id in range(len(groups)):
        assert (desk.tokens_in(group_id, 3, 5) == desk.tokens_in(group_id, source.slots(group_id)[2], 5)).all()


@pytest.mark.parametrize("group_id", range(3))
def test_a_block_that_one_group_lacks_is_copied_in_none(group_id: int) -> None:
    desk = Desk(FULL_AND_TWO_WINDOWS)
    source = desk.enter(text(1, 48))
    desk.leave(source)
    desk.forget(Tier.DEVICE, source, (group_id, 2))

    reader = desk.enter(text(1, 37) + text(2, 20))

    assert (reader.promotion.num_tokens, reader.tokens.copied) == (32, 0)


def test_only_what_is_on_the_device_is_copied() -> None:
    desk = Desk(num_host_slots=20)
    source = desk.enter(text(1, 48))
    desk.leave(source)
    desk.spill_all()
    desk.forget(Tier.DEVICE, source, (0, 2))
    assert desk.cache.lookups.where(source.chain) == [Tier.DEVICE, Tier.DEVICE, Tier.HOST]

    reader = desk.enter(text(1, 37) + text(2, 20))

    assert (reader.promotion.num_tokens, reader.tokens.copied) == (32, 0)


def first_block_below(token_ids: list[int]) -> Desk:
    """A device that has all blocks of a prompt but the first, which is in host memory."""
    desk = Desk(num_host_slots=20, store=MemoryStore(1 << 24))
    reader = desk.enter(token_ids)
    desk.leave(reader)
    desk.flush()
    desk.forget(Tier.DEVICE, reader, (0, 0))
    assert desk.cache.lookups.where(reader.chain)[:2] == [Tier.HOST, Tier.DEVICE]
    return desk


def test_a_part_is_copied_behind_blocks_that_come_from_below() -> None:
    desk = first_block_below(text(1, 48))

    tokens = desk.enter(text(1, 37) + text(2, 20)).tokens

    assert (tokens.host, tokens.device, tokens.copied, tokens.recomputed) == (16, 16 + 5, 5, 20)


def test_a_copy_behind_blocks_that_did_not_arrive_is_given_back() -> None:
    desk = first_block_below(text(1, 48))
    reader = desk.arrive(text(1, 37) + text(2, 20))
    assert (reader.promotion.num_tokens, reader.promotion.num_copied) == (32, 5)
    desk.lanes[Route.HOST_TO_DEVICE].failing = 1.0

    desk.settle()

    assert (reader.promotion.num_tokens, reader.promotion.num_copied) == (0, 0)
    assert reader.promotion.tables[0].tolist() == []
    assert reader.tokens.num_tokens == reader.tokens.recomputed == 57
    assert desk.cache.free_slots() == [10]
    desk.check()


def test_one_that_goes_before_its_blocks_have_come_gives_its_copy_back() -> None:
    desk = first_block_below(text(1, 48))
    reader = desk.arrive(text(1, 37) + text(2, 20))
    assert (reader.promotion.num_tokens, reader.promotion.num_copied) == (32, 5)

    desk.cache.cancel(reader.promotion)
    desk.settle()

    assert desk.cache.free_slots() == [10]
    desk.check()


def test_a_block_evicted_between_lookup_and_promote_is_not_copied() -> None:
    desk = Desk()
    source = desk.enter(text(1, 48))
    desk.leave(source)
    prompt = text(1, 37) + text(2, 20)
    hit = desk.lookup(prompt)
    desk.evict_blocks(source.chain.names[2:])

    promotion = desk.cache.promote(hit)

    assert hit.partial is not None
    assert (promotion.num_tokens, promotion.num_copied) == (32, 0)
    assert promotion.tables[0].tolist() == [0, 1]


@pytest.mark.parametrize("group_id", range(3))
def test_a_block_that_one_group_has_evicted_since_the_lookup_is_copied_in_none(group_id: int) -> None:
    desk = Desk(FULL_AND_TWO_WINDOWS)
    source = desk.enter(text(1, 48))
    desk.leave(source)
    hit = desk.lookup(text(1, 37) + text(2, 20))
    desk.forget(Tier.DEVICE, source, (group_id, 2))

    promotion = desk.cache.promote(hit)

    assert (promotion.num_tokens, promotion.num_copied) == (32, 0)
    assert [len(table) for table in promotion.tables] == [2, 2, 2]


def test_a_slot_that_has_another_block_since_the_lookup_is_not_copied() -> None:
    desk = Desk(num_slots=4)
    source = desk.enter(text(1, 48))
    desk.leave(source)
    hit = desk.lookup(text(1, 37) + text(2, 20))
    other = desk.enter(text(3, 32))
    assert 2 in other.slots()
    desk.leave(other)

    promotion = desk.cache.promote(hit)

    assert (promotion.num_tokens, promotion.num_copied) == (32, 0)
    desk.check()


def test_without_a_free_slot_for_the_copy_the_block_is_computed() -> None:
    desk = Desk(num_slots=4)
    desk.leave(desk.enter(text(1, 48)))
    assert desk.cache.allocate([1]) is not None

    reader = desk.arrive(text(1, 37) + text(2, 5))  # the one free slot beside the hit is the one to copy from

    assert desk.cache.free_slots() == [1]
    assert (reader.promotion.num_tokens, reader.promotion.num_copied) == (32, 0)
    assert reader.promotion.tables[0].tolist() == [0, 1]
    desk.run(reader, 42)
    assert reader.slots() == [0, 1, 2]


def test_the_smallest_device_computes_a_block_again_rather_than_copy_it() -> None:
    desk = Desk(num_slots=1)
    desk.leave(desk.enter(text(1, 16)))

    reader = desk.enter(text(1, 16))

    assert reader.tokens.recomputed == 16
    assert reader.slots() == [0]


def test_a_copy_does_not_evict_the_block_it_is_made_from() -> None:
    desk = Desk(num_slots=3)
    source = desk.enter(text(1, 16))
    other = desk.enter(text(2, 32))
    desk.leave(source, other)
    assert desk.queue() == [0, 2, 1]

    reader = desk.enter(text(1, 9) + text(3, 4))

    assert reader.tokens.copied == 9
    assert desk.holders(source) == [0]
    assert reader.slots() == [2]


# --- last blocks that are not full


def test_a_block_that_is_not_full_is_shared_once_its_reader_has_left() -> None:
    desk = Desk()
    first = desk.enter(text(1, 40))
    while_it_reads = desk.lookup(text(1, 40)).partial

    desk.leave(first)
    after = desk.enter(text(1, 40))

    assert while_it_reads is None  # its slot may be written to at any time
    assert (after.promotion.num_tokens, after.tokens.copied) == (32, 7)


def test_a_block_that_is_not_full_is_no_hit_and_nobody_is_told_of_it() -> None:
    desk = Desk()
    first = desk.enter(text(1, 40))
    desk.log.take()

    desk.leave(first)

    assert desk.log.take() == []
    assert desk.lookup(text(1, 49)).num_tokens == 32
    desk.leave(desk.enter(text(2, 160)))
    told = [name for event in desk.log.take() if isinstance(event, BlockRemoved) for name in event.names]
    assert told == first.chain.names[1::-1]


def test_evicting_a_block_that_is_not_full_is_no_event() -> None:
    desk = Desk()
    desk.leave(desk.enter(text(1, 9)))

    desk.enter(text(2, 159))

    assert [type(event) for event in desk.log.take()] == [BlockStored]


def test_of_a_block_that_is_not_full_no_more_is_shared_than_was_computed() -> None:
    desk = Desk(num_slots=2)
    before, other = desk.enter(text(1, 16)), desk.enter(text(2, 16))
    desk.leave(before)
    desk.evict_blocks(before.chain.names)
    shorter = desk.enter(text(1, 4))
    assert shorter.slots() == [0]  # where more of these tokens have been before
    desk.leave(shorter, other)

    reader = desk.enter(text(1, 10))

    assert reader.tokens.copied == 4


def test_a_block_that_is_not_full_is_evicted_before_the_blocks_it_continues() -> None:
    desk = Desk()
    first, second = desk.enter(C + [3] * 7), desk.enter(C + [4] * 5)

    desk.leave(first, second)

    assert desk.queue() == [5, 6, 7, 8, 9, 3, 4, 2, 1, 0]


def test_the_same_unfinished_block_is_kept_once() -> None:
    desk = Desk()
    first, second = desk.enter(text(1, 20)), desk.enter(text(1, 20))

    desk.leave(first, second)

    assert desk.pools[0].num_named == 2
    assert desk.cache.free_slots() == [10]


def test_a_block_that_is_not_full_is_not_spilled() -> None:
    desk = Desk(num_slots=8, num_host_slots=20, store=MemoryStore(1 << 24))
    reader = desk.enter(text(1, 40))
    desk.leave(reader)

    desk.flush()

    host = desk.index.host
    assert host is not None
    assert host[0].pool.num_named == desk.store.statistics().num_records == 2


def test_without_partial_blocks_a_block_that_is_not_full_is_blank_when_its_reader_leaves() -> None:
    desk = Desk(partial_blocks=False)

    desk.leave(desk.enter(text(1, 40)))

    assert desk.queue() == [2, 3, 4, 5, 6, 7, 8, 9, 1, 0]


# --- blocks from below, vLLM's external tokens


def test_blocks_on_their_way_up_are_leased_and_found_by_nobody_before_they_are_there() -> None:  # S22
    desk = Desk(num_host_slots=20, store=on_disk(text(1, 64)))
    reader = desk.arrive(text(1, 100))

    under_way = desk.pools[0].num_named, desk.cache.free_slots(), reader.promotion.done
    desk.settle()

    assert under_way == (0, [6], False)
    assert reader.promotion.done
    assert desk.holders(reader) == [0, 1, 2, 3, None, None]
    desk.run(reader, 100)
    assert reader.slots() == [0, 1, 2, 3, 4, 5, 6]
    assert desk.holders(reader) == [0, 1, 2, 3, 4, 5]
    assert (reader.tokens.disk, reader.tokens.recomputed) == (64, 36)


def test_a_hit_is_partly_on_the_device_and_partly_below() -> None:  # S23
    desk = Desk(num_slots=20, num_host_slots=20, store=on_disk(text(1, 96)))
    desk.leave(desk.enter(text(1, 32), reads_cache=False))

    reader = desk.arrive(text(1, 100))

    assert reader.promotion.tables[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert [desk.pools[0].name(slot) is not None for slot in range(6)] == [True, True, False, False, False, False]
    desk.settle()
    desk.run(reader, 100)
    assert reader.slots() == [0, 1, 2, 3, 4, 5, 6]
    assert desk.holders(reader) == [0, 1, 2, 3, 4, 5]
    assert (reader.tokens.device, reader.tokens.disk, reader.tokens.recomputed) == (32, 64, 4)


def test_all_groups_lease_their_hits_before_any_slot_is_taken_for_blocks_from_below() -> None:  # S24
    groups = (FullAttention(16), FullAttention(16))
    desk = Desk(groups, num_slots=4, num_host_slots=20, store=on_disk(text(1, 64), groups))
    mine, other = desk.enter(text(1, 32), reads_cache=False), desk.enter(text(2, 32))
    desk.leave(mine, other)
    assert [desk.queue(group_id) for group_id in range(2)] == [[1, 0, 3, 2]] * 2  # the hit is the oldest

    reader = desk.arrive(text(1, 65))

    assert [table.tolist() for table in reader.promotion.tables] == [[0, 1, 3, 2]] * 2
    desk.settle()
    assert reader.promotion.num_tokens == 64
    assert [desk.holders(reader, group_id) for group_id in range(2)] == [[0, 1, 3, 2]] * 2
    desk.check()


def test_a_hit_takes_no_more_slots_than_it_lacks_while_others_lease_the_rest_of_it() -> None:  # S10, S23
    desk = Desk(num_slots=6, num_host_slots=20, store=on_disk(text(1, 64)))
    desk.enter(text(1, 32), reads_cache=False)
    assert desk.cache.allocate([2]) is not None

    reader = desk.arrive(text(1, 65))
    desk.settle()

    assert reader.promotion.num_tokens == 64
    assert reader.promotion.tables[0].tolist()[:2] == [0, 1]
    assert desk.cache.free_slots() == [0]


def computed_while_it_came_up() -> tuple[Desk, Reader, Reader]:
    """One request waits for blocks from below. Before they arrive, one that does not read the cache computes them."""
    desk = Desk(num_slots=20, num_host_slots=20, store=on_disk(text(1, 64)))
    waiting = desk.arrive(text(1, 80))
    other = desk.arrive(text(1, 64), reads_cache=False)
    desk.run(other, 64)
    assert not waiting.promotion.done
    desk.settle()
    assert waiting.promotion.num_tokens == 64
    return desk, waiting, other


def test_a_block_that_somebody_computed_while_it_came_up_is_kept_once() -> None:
    desk, waiting, other = computed_while_it_came_up()

    desk.run(waiting, 80)

    assert waiting.slots()[:4] == other.slots() == desk.holders(other)


def test_a_prefix_outlives_what_continues_it_also_if_it_was_computed_while_it_came_up() -> None:
    desk, waiting, other = computed_while_it_came_up()
    desk.run(waiting, 80)

    desk.leave(other)
    desk.leave(waiting)

    assert desk.pools[0].cached_slots() == desk.holders(waiting)[::-1]


def test_a_hit_in_host_memory_that_room_is_made_for_may_be_gone_by_then() -> None:
    desk = Desk((FullAttention(4),), num_slots=16, num_host_slots=12)
    for seed in (1, 2):
        desk.leave(desk.enter(text(seed, 40)))
        desk.spill_all()
    chain = desk.chain_of(text(1, 41))
    hit = desk.cache.lookup(chain, 41)
    assert hit.num_tokens == 40
    for _ in range(20):  # copies that make room push out, of a host too small, what the room is for
        if desk.cache.make_room(hit):
            break
        desk.settle()
    assert desk.cache.lookups.where(chain)[-1] is None

    promotion = desk.cache.promote(hit)
    desk.settle()

    assert promotion.done
    assert promotion.num_tokens < 40
    desk.check()


# --- groups that forget


def test_of_a_window_s_hit_only_the_blocks_it_needs_are_taken_from_the_free_ones() -> None:  # S40
    for window, num_nulls in ((20, 0), (10, 5)):
        desk = Desk((SlidingWindow(2, window),), num_slots=20)
        desk.leave(desk.enter(text(1, 20)))

        reader = desk.enter(text(1, 20) + text(2, 20))

        assert reader.promotion.num_tokens == 20
        assert reader.slots()[:num_nulls] == [_] * num_nulls
        assert NO_SLOT not in reader.slots()[num_nulls:]
        assert desk.cache.free_slots() == [num_nulls]  # ten blocks found and ten computed, but for these


def test_of_ten_blocks_below_a_window_takes_the_two_that_it_still_reads() -> None:  # S41
    window = (SlidingWindow(16, 32),)
    desk = Desk(window, num_host_slots=20, store=on_disk(text(1, 160), window))

    reader = desk.arrive(text(1, 161))
    desk.settle()

    assert reader.promotion.num_tokens == 160
    assert reader.promotion.tables[0].tolist() == [_] * 8 + [0, 1]
    assert desk.cache.free_slots() == [8]
    assert reader.tokens.disk == 160


def test_full_attention_and_two_windows_share_a_prefix() -> None:  # S42
    desk = Desk(FULL_AND_TWO_WINDOWS, num_slots=20)
    first = desk.enter(C + [3] * 7)

    second = desk.arrive(C + [3] * 5)

    assert [first.slots(group_id) for group_id in range(3)] == [[0, 1, 2, 3]] * 3
    assert second.promotion.num_tokens == 48
    assert [table.tolist() for table in second.promotion.tables] == [[0, 1, 2], [_, 1, 2], [_, 1, 2]]
    desk.run(second, 53)
    assert [second.slots(group_id) for group_id in range(3)] == [[0, 1, 2, 4], [_, 1, 2, 4], [_, 1, 2, 4]]


LAST_OF_ALL = [(0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ([(1, 0), (2, 0)], 48),
        ([(0, 0)], 0),
        (LAST_OF_ALL, 32),
        ([(0, 2)], 32),
        ([(2, 2)], 32),
        ([(0, 2), (1, 0), (2, 0)], 0),
    ],
)
def test_where_groups_lost_different_blocks_a_prompt_resumes_where_all_can(
    lost: list[tuple[int, int]], expected: int
) -> None:  # S42
    desk = Desk(FULL_AND_TWO_WINDOWS, num_slots=20)
    first = desk.enter(C + [3] * 7)
    desk.leave(first)

    desk.forget(Tier.DEVICE, first, *lost)
    reader = desk.enter(C + [3] * 5)

    assert reader.promotion.num_tokens == expected


def test_with_retention_0_a_window_names_the_end_of_a_prompt_and_everything_else_is_blank() -> None:  # S43
    desk = Desk(FULL_AND_TWO_WINDOWS, num_slots=20, retention_tokens=0, partial_blocks=False)
    first = desk.enter(C + [3] * 7)

    second = desk.enter(C + [3] * 5)

    assert [desk.holders(first, group_id) for group_id in range(3)] == [[0, 1, 2], [None, 1, 2], [None, 1, 2]]
    assert second.promotion.num_tokens == 48
    desk.leave(first, second)
    rest = list(range(5, 20))
    assert desk.queue(0) == [4, 3, *rest, 2, 1, 0]
    assert desk.queue(1) == desk.queue(2) == [4, 0, 3, *rest, 2, 1]


@pytest.mark.parametrize(("lost", "junction"), [((0, 2), 32), ((2, 2), 48)])
def test_with_retention_0_a_lost_block_leaves_nothing_to_resume_at_but_a_junction(
    lost: tuple[int, int], junction: int
) -> None:  # S43
    desk = Desk(FULL_AND_TWO_WINDOWS, num_slots=20, retention_tokens=0)
    first = desk.enter(C + [3] * 7)
    desk.leave(first)
    desk.forget(Tier.DEVICE, first, lost)

    hit = desk.lookup(C + [3] * 5)

    assert (hit.num_tokens, desk.cache.lookups.junction(hit)) == (0, junction)


def test_with_retention_0_the_blocks_a_junction_showed_to_be_missing_are_kept_the_next_time() -> None:  # S43
    desk = Desk(FULL_AND_TWO_WINDOWS, num_slots=40, retention_tokens=0)
    desk.leave(desk.enter(text(1, 64) + text(2, 40)))

    second = desk.enter(text(1, 64) + text(3, 40))
    desk.leave(second)
    third = desk.enter(text(1, 64) + text(4, 40))

    assert (second.promotion.num_tokens, second.junction) == (0, 64)
    assert third.promotion.num_tokens == 64
    assert third.slots(1)[:2] == third.slots(2)[:2] == [_, _]


def test_with_retention_0_no_part_of_a_block_is_shared_that_the_windows_did_not_name() -> None:  # S43
    desk = Desk(FULL_AND_TWO_WINDOWS, num_slots=20, retention_tokens=0)
    desk.leave(desk.enter(text(1, 160)))

    reader = desk.enter(text(1, 9) + text(2, 9))

    assert reader.tokens.device == 0


def test_the_same_prompt_is_found_with_retention_0_whatever_its_length() -> None:  # S43
    for num_tokens in (47, 48, 49, 63, 64, 65, 100):
        desk = Desk(FULL_AND_TWO_WINDOWS, num_slots=20, retention_tokens=0)
        desk.leave(desk.enter(text(1, num_tokens)))

        again = desk.enter(text(1, num_tokens))

        assert again.promotion.num_tokens == (num_tokens - 1) // 16 * 16


def test_a_group_of_large_blocks_and_a_window_of_small_ones_meet_where_both_end() -> None:  # S44
    desk = Desk(FULL_32_AND_WINDOW_16, num_slots=20)
    first = desk.enter(text(1, 100))

    sibling = desk.arrive(text(1, 80) + text(2, 20))

    assert [first.slots(group_id) for group_id in range(2)] == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]]
    assert desk.holders(first, 0) == [0, 1, 2]
    assert desk.holders(first, 1) == [0, 1, 2, 3, 4, 5]
    assert sibling.promotion.num_tokens == 64
    assert [table.tolist() for table in sibling.promotion.tables] == [[0, 1], [_, _, 2, 3]]
    desk.run(sibling, 100)
    assert [sibling.slots(group_id) for group_id in range(2)] == [[0, 1, 4, 5], [_, _, 2, 3, 4, 8, 9]]


def test_blocks_of_different_sizes_that_are_computed_in_any_chunks_are_named_once_full() -> None:  # S44
    desk = Desk(FULL_32_AND_WINDOW_16, num_slots=20)

    reader = desk.enter(text(1, 100), stops=[20, 40, 41, 79, 90])

    names = reader.chain.names
    assert [desk.pools[0].find(name) for name in names] == [None, 0, None, 1, None, 2]
    assert [desk.pools[1].find(name) for name in names] == [0, 1, 2, 3, 4, 5]


def test_with_retention_0_and_two_sizes_only_the_same_prompt_resumes_and_a_sibling_finds_a_junction() -> None:  # S44
    desk = Desk(FULL_32_AND_WINDOW_16, num_slots=20, retention_tokens=0)
    first = desk.enter(text(1, 100))
    sibling = text(1, 80) + text(2, 20)

    hit, again = desk.lookup(sibling), desk.lookup(text(1, 100))

    assert desk.holders(first, 1) == [None, None, None, None, 4, 5]
    assert (hit.num_tokens, desk.cache.lookups.junction(hit)) == (0, 64)
    assert (again.num_tokens, desk.cache.lookups.junction(again)) == (96, None)
    desk.leave(first, desk.enter(sibling))
    assert desk.lookup(text(1, 80) + text(3, 20)).num_tokens == 64


def test_large_blocks_come_back_from_disk_beside_small_ones() -> None:  # S44
    desk = Desk(FULL_32_AND_WINDOW_16, 20, 40, on_disk(text(1, 100), FULL_32_AND_WINDOW_16))

    reader = desk.enter(text(1, 80) + text(2, 20))

    assert reader.promotion.num_tokens == 64
    assert [reader.slots(0)[:2], reader.slots(1)[:4]] == [[0, 1], [_, _, 0, 1]]
    assert (reader.tokens.disk, reader.tokens.recomputed) == (64, 36)


def test_a_state_is_found_after_the_chunk_that_left_it() -> None:  # S45
    desk = Desk(FULL_AND_STATE)
    first = desk.enter(C)

    sibling = desk.arrive(C + [9] * 7)

    assert [first.slots(group_id) for group_id in range(2)] == [[0, 1, 2], [_, _, 0]]
    assert sibling.promotion.num_tokens == 48
    assert [table.tolist() for table in sibling.promotion.tables] == [[0, 1, 2], [_, _, 0]]
    desk.run(sibling, 55)
    assert [sibling.slots(group_id) for group_id in range(2)] == [[0, 1, 2, 3], [_, _, 0, 1]]
    assert desk.lookup(C[:47] + [8] + [9] * 7).num_tokens == 0  # it leaves before the only state


def test_with_retention_0_a_state_is_kept_where_the_prompt_s_last_full_block_ends() -> None:  # S45
    at_once, in_two = (Desk(FULL_AND_STATE, retention_tokens=0) for _ in range(2))
    at_once.enter(C)
    first = in_two.enter(C + [3] * 7, stops=[48])

    hit = at_once.lookup(C + [9] * 7)

    assert (hit.num_tokens, at_once.cache.lookups.junction(hit)) == (0, 48)
    assert [first.slots(group_id) for group_id in range(2)] == [[0, 1, 2, 3], [_, _, 0, 1]]
    assert in_two.lookup(C + [9] * 7).num_tokens == 48


def test_nothing_is_found_of_what_is_allocated_but_not_yet_computed() -> None:  # S46
    desk = Desk(FULL_AND_TWO_WINDOWS)
    reader = desk.arrive(C)
    slots = desk.cache.allocate([3, 3, 3])
    assert slots is not None

    in_the_same_step = desk.lookup([*C, 9])
    desk.cache.commit(slots, reader.chain, 0, 48)

    assert in_the_same_step.num_tokens == 0
    assert in_the_same_step.partial is None
    assert desk.lookup([*C, 9]).num_tokens == 48


# --- events


def stored(events: Iterable[Event]) -> list[BlockStored]:
    return [event for event in events if isinstance(event, BlockStored)]


def test_what_is_computed_is_told_in_one_event_with_its_tokens_and_what_it_continues() -> None:  # S47
    desk = Desk()
    reader = desk.arrive(text(1, 40))
    desk.run(reader, 40)

    first = desk.log.take()
    desk.answer(reader, text(2, 8))
    second = desk.log.take()

    names = reader.chain.names
    assert first == [BlockStored(Tier.DEVICE, 0, names[:2], 16, None, text(1, 32), 0)]
    assert second == [BlockStored(Tier.DEVICE, 0, names[2:], 16, names[1], reader.token_ids[32:48], 32)]


def test_what_gives_way_is_told_before_what_takes_its_place() -> None:  # S47
    desk = Desk(num_slots=3)
    first = desk.enter(text(1, 48))
    desk.leave(first)
    desk.log.take()

    second = desk.enter(text(2, 48))

    removed, new = desk.log.take()
    assert removed == BlockRemoved(Tier.DEVICE, 0, first.chain.names[::-1])
    assert new == BlockStored(Tier.DEVICE, 0, second.chain.names, 16, None, text(2, 48), 0)


def test_every_group_is_told_of_by_itself_with_its_own_size_of_blocks() -> None:  # S47
    desk = Desk(FULL_32_AND_WINDOW_16, num_slots=20)

    reader = desk.enter(text(1, 100), stops=[64])

    names = reader.chain.names
    assert desk.log.take() == [
        BlockStored(Tier.DEVICE, 0, names[1:4:2], 32, None, text(1, 64), 0),
        BlockStored(Tier.DEVICE, 1, names[:4], 16, None, text(1, 64), 0),
        BlockStored(Tier.DEVICE, 0, names[5:6], 32, names[3], text(1, 96)[64:], 64),
        BlockStored(Tier.DEVICE, 1, names[4:6], 16, names[3], text(1, 96)[64:], 64),
    ]


def test_only_the_blocks_that_retention_keeps_are_told() -> None:  # S47
    desk = Desk(FULL_AND_TWO_WINDOWS, num_slots=20, retention_tokens=0)

    reader = desk.enter(C + [3] * 7)

    names = reader.chain.names
    assert [(event.group_id, event.names, event.first_token) for event in stored(desk.log.take())] == [
        (0, names, 0),
        (1, names[1:], 16),
        (2, names[1:], 16),
    ]


def test_extra_keys_are_told_with_the_blocks() -> None:  # S47
    desk = Desk()
    extra = ExtraKeys(lora=Lora("a", "/a"), cache_salt="me")

    desk.enter(text(1, 40), extra)

    assert [event.extra for event in stored(desk.log.take())] == [extra]


def test_blocks_that_were_found_are_not_told_again_and_copies_of_parts_not_at_all() -> None:  # S47
    desk = Desk()
    desk.enter(text(1, 48))
    desk.log.take()

    again = desk.arrive(text(1, 48))
    desk.run(again, 48)  # the last block is copied, computed and adopted

    assert desk.log.take() == []


def test_of_a_run_of_which_some_blocks_are_there_already_the_new_ones_are_told() -> None:  # S47
    desk = Desk(num_slots=20)
    first = desk.enter(text(1, 64))
    desk.evict_blocks(first.chain.names[1:2])
    desk.log.take()

    desk.enter(text(1, 64), reads_cache=False)

    names = first.chain.names
    assert desk.log.take() == [BlockStored(Tier.DEVICE, 0, names[1:2], 16, names[0], text(1, 32)[16:], 16)]


def test_what_a_window_has_passed_is_still_the_parent_that_is_told() -> None:  # S49
    desk = Desk((SlidingWindow(16, 17),))
    reader = desk.enter(text(1, 48), stops=[16, 32])
    desk.cache.forget_read(reader.tables, 48)
    assert reader.slots() == [_, _, 2]
    desk.log.take()

    desk.answer(reader, text(2, 16))

    (event,) = desk.log.take()
    assert reader.slots() == [_, _, 2, 3]
    assert event == BlockStored(
        Tier.DEVICE, 0, reader.chain.names[3:], 16, reader.chain.names[2], reader.token_ids[48:], 48
    )


def test_a_block_without_a_slot_gets_no_name() -> None:  # S49
    desk = Desk(FULL_AND_TWO_WINDOWS, num_slots=20)
    reader = desk.enter(C + [3] * 7)
    desk.leave(reader)
    desk.forget(Tier.DEVICE, reader, (1, 0), (2, 0))

    desk.enter([*C, *text(1, 20)])

    assert desk.holders(reader, 1)[0] is None
    assert desk.pools[0].find(BlockName(b"")) is None


def test_a_copy_down_a_copy_up_and_an_eviction_are_told_by_tier() -> None:  # S47
    store = MemoryStore(1 << 24)
    desk = Desk(num_slots=8, num_host_slots=20, store=store)
    reader = desk.enter(text(1, 32))
    names = reader.chain.names
    desk.leave(reader)
    desk.log.take()

    desk.flush()
    going_down = desk.log.take()
    desk.forget(Tier.DEVICE, reader, (0, 0), (0, 1))
    desk.forget(Tier.HOST, reader, (0, 1))
    evicted = desk.log.take()
    again = desk.enter(text(1, 33))
    coming_up = desk.log.take()

    assert again.tokens.disk == 16
    assert {(event.tier, name) for event in stored(going_down) for name in event.names} == {
        (tier, name) for tier in (Tier.HOST, Tier.DISK) for name in names
    }
    assert len(stored(going_down)) == len(going_down)
    assert evicted == [
        BlockRemoved(Tier.DEVICE, 0, names[:1]),
        BlockRemoved(Tier.DEVICE, 0, names[1:]),
        BlockRemoved(Tier.HOST, 0, names[1:]),
    ]
    assert [event for event in coming_up if event.tier is Tier.HOST] == [BlockStored(Tier.HOST, 0, names[1:], 16)]
    assert [event for event in coming_up if event.tier is Tier.DEVICE] == [
        BlockStored(Tier.DEVICE, 0, names[:1], 16, None, text(1, 16), 0),
        BlockStored(Tier.DEVICE, 0, names[1:], 16, names[0], text(1, 32)[16:], 16),
    ]


def test_a_block_is_told_in_the_lower_tier_before_it_goes_from_the_upper() -> None:  # S47
    desk = Desk(num_slots=4, num_host_slots=20)
    desk.leave(desk.enter(text(1, 32)))
    desk.spill_all()
    desk.leave(desk.enter(text(2, 64)))

    told = [(event.tier, type(event), name) for event in desk.log.take() for name in event.names]

    gone = [name for tier, kind, name in told if kind is BlockRemoved]
    assert gone
    for name in gone:
        if (Tier.HOST, BlockStored, name) in told:
            assert told.index((Tier.HOST, BlockStored, name)) < told.index((Tier.DEVICE, BlockRemoved, name))
    assert any((Tier.HOST, BlockStored, name) in told for name in gone)


def test_what_a_full_disk_drops_is_told() -> None:  # S47
    charge = on_disk(text(1, 16)).statistics().stored_bytes
    desk = Desk(num_slots=8, num_host_slots=20, store=MemoryStore(3 * charge))
    for seed in (1, 2, 3):
        desk.leave(desk.enter(text(seed, 32)))
        desk.flush()

    book = Book()
    book.take_in(desk.log.take())

    assert len(book.blocks[Tier.DISK]) == 3
    assert book.blocks[Tier.DISK] == contents(desk)[Tier.DISK]


def test_what_is_on_disk_is_told_at_the_start() -> None:  # S47
    store = on_disk(text(1, 100), FULL_32_AND_WINDOW_16)

    desk = Desk(FULL_32_AND_WINDOW_16, 20, 40, store)

    names = desk.chain_of(text(1, 100)).names
    told = desk.log.take()
    assert [(event.tier, event.group_id, event.block_size, event.token_ids) for event in stored(told)] == [
        (Tier.DISK, 0, 32, ()),
        (Tier.DISK, 1, 16, ()),
    ]
    assert [set(event.names) for event in stored(told)] == [set(names[1::2]), set(names)]
    assert len(told) == 2


def test_an_empty_disk_tells_nothing_at_the_start() -> None:
    assert Desk(num_host_slots=20, store=MemoryStore(1 << 24)).log.take() == []


def test_a_record_that_rotted_is_told_as_gone_from_the_disk() -> None:  # S47
    store = on_disk(text(1, 32))
    store.delete(list(store.keys())[-1:])
    desk = Desk(num_host_slots=20, store=store)
    book = Book()
    hit = desk.lookup(text(1, 33))
    store.delete(list(store.keys()))

    desk.cache.promote(hit)
    desk.settle()

    book.take_in(desk.log.take())
    assert book.blocks[Tier.DISK] == contents(desk)[Tier.DISK] == set()


def test_a_read_that_failed_does_not_tell_the_block_away_that_is_still_found() -> None:  # S47
    desk = Desk(num_host_slots=20, store=on_disk(text(1, 32)))
    book = Book()
    desk.lanes[Route.DISK_TO_HOST].failing = 1.0

    reader = desk.arrive(text(1, 33))
    desk.settle()

    assert reader.promotion.reason_at_end is Reason.FAILED
    assert desk.lookup(text(1, 33)).num_tokens == 32
    book.take_in(desk.log.take())
    assert book.blocks[Tier.DISK] == contents(desk)[Tier.DISK]


def test_a_reset_is_told_once_for_all_tiers() -> None:  # S47
    desk = Desk(num_slots=8, num_host_slots=20, store=MemoryStore(1 << 24))
    desk.leave(desk.enter(text(1, 64)))
    desk.flush()
    desk.log.take()

    assert desk.cache.reset()

    desk.settle()
    assert desk.log.take() == [AllBlocksCleared()]
    assert contents(desk) == Book().blocks


class Book:
    """What a router believes that hears nothing but events."""

    def __init__(self) -> None:
        self.blocks: dict[Tier, set[tuple[int, BlockName]]] = {tier: set() for tier in Tier}

    def take_in(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks = {tier: set() for tier in Tier}
                continue
            blocks = {(event.group_id, name) for name in event.names}
            assert len(blocks) == len(event.names) > 0, "an event about nothing"
            if isinstance(event, BlockStored):
                assert not blocks & self.blocks[event.tier], "a block was told twice"
                self.blocks[event.tier] |= blocks
            else:
                assert blocks <= self.blocks[event.tier], "a block was told away that nobody had been told of"
                self.blocks[event.tier] -= blocks


def contents(desk: Desk) -> dict[Tier, set[tuple[int, BlockName]]]:
    """What can be found in each tier."""
    found: dict[Tier, set[tuple[int, BlockName]]] = {tier: set() for tier in Tier}
    for tier, pools in ((Tier.DEVICE, desk.pools), (Tier.HOST, [slots.pool for slots in desk.host or ()])):
        for group_id, pool in enumerate(pools):
            names = (pool.name(slot) for slot in range(pool.num_slots))
            found[tier] |= {(group_id, name) for name in names if name is not None and name not in desk.tails}
    if desk.store is not None:
        disk = desk.index.disk
        blocks = [disk.block_of(key) for key in desk.store.keys()]  # noqa: SIM118  # no dict
        found[Tier.DISK] = {block for block in blocks if block is not None}
        assert disk.index.num_blocks == len(found[Tier.DISK])
        assert all(disk.index.holds(group_id, name) for group_id, name in found[Tier.DISK])
    return found


# --- prompts that share and diverge anywhere


KINDS = {
    "full": ((FullAttention(4),), {}),
    "whole blocks only": ((FullAttention(4),), {"partial_blocks": False}),
    "window": ((SlidingWindow(4, 10),), {}),
    "hybrid": ((SlidingWindow(4, 10), FullAttention(4)), {}),
    "sparse": ((FullAttention(4), SlidingWindow(4, 10)), {"retention_tokens": 0}),
    "chunks": ((FullAttention(4), ChunkedLocal(4, 12)), {"retention_tokens": 16}),
    "sizes": ((FullAttention(8), SlidingWindow(4, 10)), {}),
    "states": ((FullAttention(4), RecurrentState(8)), {}),
}


class Crowd:
    """Readers of prompts with much in common, few slots, and what their hits must be."""

    def __init__(self, kind: str, seed: int) -> None:
        self.pick = random.Random(seed)
        groups, options = KINDS[kind]
        store = MemoryStore(self.pick.choice([60, 1000]) * 4608)
        self.desk = Desk(groups, self.pick.choice([16, 30]), self.pick.choice([10, 60]), store, **options)
        self.book = Book()
        self.readers: list[Reader] = []
        self.num_hits = self.num_copied = 0
        self.stems = [[self.pick.randrange(2) for _ in range(40)] for _ in range(3)]

    def prompt(self) -> list[int]:
        stem = self.pick.choice(self.stems)
        length = self.pick.randrange(len(stem))
        return stem[:length] + [self.pick.randrange(3) for _ in range(self.pick.randrange(1, 12))]

    def step(self) -> None:
        desk = self.desk
        dice = self.pick.random()
        if dice < 0.5:
            self.arrive()
        elif dice < 0.8 and self.readers:
            desk.leave(self.readers.pop(self.pick.randrange(len(self.readers))))
        elif dice < 0.98:
            desk.cache.spill()
            desk.settle()
        else:
            desk.cache.reset()
            desk.settle()  # deletes the records on disk
        self.book.take_in(desk.log.take())
        assert self.book.blocks == contents(desk), "events and contents disagree"

    def arrive(self) -> None:
        desk, token_ids = self.desk, self.prompt()
        extra = self.pick.choice([NO_EXTRA_KEYS] * 5 + [ExtraKeys(cache_salt="me"), ExtraKeys(lora=Lora("a", "/a"))])
        num_tokens, num_shared = self.expected(token_ids, extra)
        reader = desk.arrive(token_ids, extra)
        assert reader.hit.num_tokens == num_tokens
        assert (0 if reader.hit.partial is None else reader.hit.partial.num_tokens) == num_shared
        desk.settle()
        assert reader.tokens.num_tokens == len(token_ids)
        assert sum(reader.tokens.reasons.values()) == reader.tokens.recomputed > 0
        needed = [-(-len(token_ids) // g.block_size) for g in desk.cache.groups]
        missing = [num - len(table) for num, table in zip(needed, reader.promotion.tables, strict=True)]
        if any(num > free for num, free in zip(missing, desk.cache.free_slots(), strict=True)):
            desk.cache.release(reader.promotion.tables)
            desk.check()
            return
        self.num_hits += reader.promotion.num_tokens > 0
        self.num_copied += reader.promotion.num_copied > 0
        start = reader.promotion.num_tokens + reader.promotion.num_copied
        for end in sorted({self.pick.randrange(start + 1, len(token_ids) + 1), len(token_ids)}):
            desk.run(reader, end)
        self.readers.append(reader)

    def expected(self, token_ids: list[int], extra: ExtraKeys) -> tuple[int, int]:
        """The hit's tokens, and how many more the best device block shares, found by looking at everything."""
        desk, cache = self.desk, self.desk.cache
        chain = desk.chain_of(token_ids, extra)
        everywhere = set().union(*self.book.blocks.values())

        def first_hole(group_id: int, start: int, end: int) -> int:
            names = chain.names_of(cache.groups[group_id].block_size, range(start, end))
            return next((start + i for i, name in enumerate(names) if (group_id, name) not in everywhere), end)

        num_tokens = longest_hit(len(token_ids) - 1, cache.groups, first_hole)
        if cache.residency.partial_group is None:
            return num_tokens, 0
        best, key = 0, chain.continued_key(num_tokens // cache.block_size)
        for candidate in self.everything_on_device():
            its_key, its_tokens = candidate
            wanted = token_ids[num_tokens : min(num_tokens + cache.block_size, len(token_ids) - 1)]
            if its_key == key:
                equal = [a == b for a, b in zip(its_tokens, wanted, strict=False)]
                best = max(best, [*equal, False].index(False))
        return num_tokens, best

    def everything_on_device(self) -> list[tuple[bytes, list[int]]]:
        """Each block that all groups have on the device: what it continues, and its tokens."""
        desk = self.desk
        held = [{pool.name(slot) for slot in range(pool.num_slots)} for pool in desk.pools]
        return [desk.origin[name] for name in set.intersection(*held) if name is not None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_any_prompts_get_the_longest_hit_the_best_copy_the_right_bytes_and_true_events(kind: str, seed: int) -> None:
    print(f"seed {seed}")
    crowd = Crowd(kind, seed)
    for _ in range(250):
        crowd.step()

    while crowd.readers:
        crowd.desk.leave(crowd.readers.pop())
    crowd.desk.check()
    assert crowd.desk.cache.free_slots() == [pool.num_slots for pool in crowd.desk.pools]
    assert crowd.num_hits > 5, "the crowd hardly ever hit: it shows nothing"
    assert (crowd.num_copied > 5) == (kind not in ("whole blocks only", "sizes", "states"))


# --- long prompts of which the device has a few blocks


LONG_PROMPT = text(2, 1100 * BLOCK_SIZE + 1)


@pytest.fixture
def with_few() -> Desk:
    """A long prompt in host memory and on disk, and its blocks 40 to 43 on the device too."""
    desk = Desk(num_slots=1200, num_host_slots=1200, store=MemoryStore(1 << 24), partial_blocks=False)
    desk.leave(desk.enter(LONG_PROMPT))
    desk.flush()
    evict(desk.cache.residency.groups[0].slots, desk, {40, 41, 42, 43})
    return desk


def evict(slots: GroupSlots, desk: Desk, but: set[int] = frozenset()) -> None:
    names = desk.chain_of(LONG_PROMPT).names
    found = slots.pool.find_all([name for place, name in enumerate(names) if place not in but])
    slots.evict(found[found >= 0], EvictionCause.ROOM)


def lose_below(desk: Desk, place: int) -> None:
    """Remove a block of the long prompt from host memory and from the disk's index."""
    index, name = desk.lower.index, desk.chain_of(LONG_PROMPT).names[place]
    index.host[0].evict(index.host[0].pool.find_all([name]), EvictionCause.ROOM)
    index.disk.index.remove(0, name)


def test_a_few_blocks_on_the_device_are_promoted_again_with_their_long_prompt(with_few: Desk) -> None:
    desk = with_few

    hit = desk.lookup(LONG_PROMPT)
    reader = desk.enter(LONG_PROMPT)

    assert hit.num_tokens == len(LONG_PROMPT) - 1
    assert (hit.device_slots[0] == NO_SLOT).all()
    assert reader.promotion.num_tokens == len(LONG_PROMPT) - 1
    desk.leave(reader)
    desk.cache.check()


def test_a_few_blocks_that_only_the_device_has_are_hit_in_a_long_prompt(with_few: Desk) -> None:
    desk = with_few
    lose_below(desk, 41)

    hit = desk.lookup(LONG_PROMPT)

    assert hit.num_tokens == len(LONG_PROMPT) - 1
    assert np.flatnonzero(hit.device_slots[0] != NO_SLOT).tolist() == [40, 41, 42, 43]


def test_a_long_prompt_ends_where_no_tier_has_a_block(with_few: Desk) -> None:
    desk = with_few
    lose_below(desk, 50)

    assert desk.lookup(LONG_PROMPT).num_tokens == 50 * BLOCK_SIZE


def test_a_long_prompt_is_read_from_disk_with_the_few_blocks_that_are_in_host_memory(with_few: Desk) -> None:
    desk = with_few
    evict(desk.lower.index.host[0], desk, {20, 21})
    names = desk.chain_of(LONG_PROMPT).names

    places = desk.lower.find_run(0, names)
    reader = desk.enter(LONG_PROMPT)

    assert places.tolist() == [ON_DISK] * len(names)
    assert reader.promotion.num_tokens == len(LONG_PROMPT) - 1
    desk.leave(reader)
    desk.cache.check()


def test_a_few_blocks_that_only_host_memory_has_are_found_in_a_long_prompt(with_few: Desk) -> None:
    desk = with_few
    evict(desk.lower.index.host[0], desk, {20, 21})
    names = desk.chain_of(LONG_PROMPT).names
    desk.lower.index.disk.index.remove(0, names[20])

    places = desk.lower.find_run(0, names)

    assert len(places) == len(names)
    assert np.flatnonzero(places != ON_DISK).tolist() == [20, 21]


# --- recurrent states


def test_a_state_at_the_end_of_the_last_block_stays_until_the_next_block_is_full() -> None:
    desk = Desk(FULL_AND_STATE, num_slots=20, retention_tokens=0)
    reader = desk.enter(text(1, 40))
    held = []

    for num_tokens in (1, 8, 8, 8):
        desk.answer(reader, text(2, num_tokens))
        desk.cache.forget_read(reader.tables, reader.num_computed)
        held.append([block_id for block_id, slot in enumerate(reader.slots(1)) if slot != _])

    # After 41, 49, 57 and 65 tokens: the last full block and the one after it.
    assert held == [[2], [2, 3], [2, 3], [3, 4]]


def test_the_state_at_the_end_of_an_answer_is_found_by_the_next_turn() -> None:
    desk = Desk(FULL_AND_STATE, num_slots=20, retention_tokens=0)
    reader = desk.enter(text(1, 40), stops=[32])
    desk.answer(reader, text(2, 30))
    before = desk.lookup([*reader.token_ids, 5]).num_tokens

    desk.cache.commit_state(reader.tables, reader.chain, reader.num_computed)
    desk.leave(reader)

    assert (before, desk.lookup([*reader.token_ids, 5]).num_tokens) == (32, 64)
    other = desk.enter([*reader.token_ids, 5])
    assert other.promotion.num_tokens == 64


def test_a_hit_with_a_state_is_loaded_as_a_whole_or_not_at_all() -> None:
    ends: list[list[float]] = []

    class Watched(LoadPlanner):
        def best(self, demand: Demand, *others: Any) -> LoadPlan:
            ends.append(demand.ends.tolist())
            return super().best(demand, *others)

    store = MemoryStore(1 << 24)
    first = Desk(FULL_AND_STATE, num_slots=20, num_host_slots=40, store=store, retention_tokens=0)
    first.leave(first.enter(text(1, 100), stops=[96]))
    first.flush()
    planner = Watched(PrefillSpeed(), 64, lambda: 0.0)
    desk = Desk(FULL_AND_STATE, num_slots=20, num_host_slots=40, store=store, retention_tokens=0, planner=planner)
    desk.settle()
    hit = desk.lookup(text(1, 100))

    desk.cache.plans.worth_loading(hit, 100)

    assert hit.num_tokens == 96
    assert ends == [[0, 96]]
