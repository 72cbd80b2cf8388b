"""The reference's scenarios as far as a scheduler is concerned: a real cache, steps by hand, a model that only counts.

The scenarios are vLLM's. Slots count from 0. The last tests have a model that computes.
"""

import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
from chaos import World
from small_models import VOCAB, build, byte_tokenizer, plain_greedy
from transformers import PreTrainedTokenizerFast

from kvtier import LLM, SamplingParams
from kvtier.engine.build_core import LOAD_TIMEOUT_S
from kvtier.engine.config import SchedulerConfig
from kvtier.engine.scheduling.request import FinishReason, Request, RequestOptions
from kvtier.engine.scheduling.scheduler import Scheduler, Work
from kvtier.engine.text.detokenizer import Detokenizer
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.events import BlockStored, EventLog
from kvtier.tiers.naming.groups import AttentionGroup, FullAttention, SlidingWindow
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.transfer.transfer_engine import Route

BLOCK_SIZE = 16
FULL = (FullAttention(16),)
FULL_AND_WINDOW = (FullAttention(16), SlidingWindow(16, 32))
C = [0] * 16 + [1] * 16 + [2] * 16


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def text(seed: int, num_tokens: int) -> list[int]:
    """Tokens of which no two are equal, nor equal to those of another seed or of an answer."""
    return list(range(1000 * seed, 1000 * seed + num_tokens))


class Machine(World):
    """An engine whose model answers every prompt with tokens that no prompt or answer had before."""

    def __init__(
        self,
        groups: Sequence[AttentionGroup] = FULL,
        num_slots: int = 10,
        num_host_slots: int = 0,
        store: MemoryStore | None = None,
        token_budget: int = 512,
        prefill_chunk: int = 512,
        **options: object,
    ) -> None:
        sizes, rng, self.log = [64 for _ in groups], random.Random(1), EventLog()
        super().__init__(groups, sizes, num_slots, num_host_slots, store, rng, events=self.log, **options)
        self.scheduler = Scheduler(
            self.cache, SchedulerConfig(token_budget=token_budget, prefill_chunk=prefill_chunk), LOAD_TIMEOUT_S
        )
        self.tokenizer = byte_tokenizer()
        self.answers = count(1_000_000)
        self.pools = [group.pool for group in self.cache.residency.groups]

    def ask(self, prompt: Sequence[int], max_tokens: int = 40, reads_cache: bool = True) -> Request:
        chain = BlockChain(self.cache.block_size)
        chain.extend(prompt)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(prompt, sampling, chain, Detokenizer(self.tokenizer), RequestOptions(reads_cache=reads_cache))
        self.scheduler.add(request)
        return request

    def step(self) -> list[tuple[Request, int]]:
        """Do one step; which requests computed how many tokens."""
        work = self.scheduler.schedule()
        self.compute_work(work)
        return [(item.request, item.num_tokens) for item in work]

    def compute_work(self, work: Sequence[Work]) -> None:
        self.scheduler.on_computed(work)
        for item in work:
            request = item.request
            if request.num_to_compute == 0:
                request.token_ids.append(next(self.answers))
                if len(request.generated) >= request.sampling.max_tokens:
                    request.finish(FinishReason.LENGTH)
                    self.scheduler.retire(request)
        self.cache.check()
        self.scheduler.check()

    def finish(self, *requests: Request) -> None:
        """Step until these requests, or all, have their answers; copies arrive between the steps."""
        for _ in range(1000):
            if not (any(r.finish_reason is None for r in requests) if requests else self.scheduler.has_work):
                return
            self.step()
            self.settle()
        raise AssertionError("no end")

    def answer(self, prompt: Sequence[int], max_tokens: int = 1, **options: bool) -> Request:
        """Run a request alone, from its beginning to its end."""
        request = self.ask(prompt, max_tokens, **options)
        self.finish(request)
        return request

    def queue(self, group_id: int = 0) -> list[int]:
        """The free slots in the order in which they would be given out; changes nothing."""
        return self.pools[group_id].blank_slots() + self.pools[group_id].cached_slots()

    def holders(self, request: Request, group_id: int = 0) -> list[int | None]:
        """For each full block of the request, the device slot in which look-ups find it."""
        return [self.pools[group_id].find(name) for name in request.chain.names]

    def flush(self) -> None:
        def progress(num_left: int) -> None:
            self.clock.now += 0.01
            for lane in self.lanes.values():
                lane.stir(1.0)

        assert self.cache.drain.flush(10, progress) == 0

    def push_out(self, request: Request, to: Tier = Tier.HOST) -> None:
        """Push the request's full blocks out of all other tiers."""
        self.flush()
        groups, below = self.cache.residency.groups, self.host
        assert below is not None
        for group_id, group in enumerate(groups):
            slots = [slot for name in request.chain.names if (slot := group.pool.find(name)) is not None]
            group.slots.evict(slots, EvictionCause.ROOM)
            if to is Tier.DISK:
                host = below[group_id]
                host.evict([host.pool.find(name) for name in request.chain.names], EvictionCause.ROOM)
        if to is Tier.HOST and self.store is not None:
            self.store.delete(list(self.store.keys()))
            self.index.disk.index.empty()
        assert set(self.cache.lookups.where(request.chain)) == {to}


def with_tiers(groups: Sequence[AttentionGroup] = FULL, num_slots: int = 20, **options: object) -> Machine:
    return Machine(groups, num_slots, num_host_slots=60, store=MemoryStore(1 << 24), **options)


# --- which requests are admitted


def test_a_request_that_does_not_fit_beside_a_running_one_waits_and_nothing_changes() -> None:  # S10
    machine = Machine()
    machine.ask(C)
    machine.step()
    machine.answer([*C, *text(1, 40)])
    late = machine.ask([*C, *text(1, 40), *text(2, 60)], max_tokens=5)
    order, leases = machine.queue(), machine.pools[0].num_leases
    machine.log.take()

    machine.step()

    assert list(machine.scheduler.waiting) == [late]
    assert (machine.queue(), machine.pools[0].num_leases) == (order, leases)
    assert machine.log.take() == []


def test_blocks_that_running_requests_hold_need_no_room_again() -> None:  # S2, S10
    machine = Machine()
    machine.ask(C)
    machine.step()
    machine.step()  # the first token of the answer takes a fourth slot: six are free
    stranger = machine.ask([7, *C, *text(1, 58)], max_tokens=3)  # seven blocks
    sibling = machine.ask([*C, *text(1, 59)], max_tokens=3)  # seven blocks, three of which are there

    machine.step()
    assert list(machine.scheduler.waiting) == [stranger, sibling]
    machine.scheduler.abort(stranger)
    machine.step()

    assert sibling.tables[0].tolist()[:3] == [0, 1, 2]
    assert machine.scheduler.running[-1] is sibling


def test_a_request_is_not_let_in_because_its_first_chunk_fits() -> None:  # S19
    machine = Machine(prefill_chunk=16)
    first = machine.ask(text(1, 48), max_tokens=8)
    machine.step()
    long = machine.ask(text(2, 140), max_tokens=2)

    machine.step()
    assert machine.cache.free_slots()[0] >= 7  # the chunk is one block
    assert list(machine.scheduler.waiting) == [long]
    machine.finish(first)
    machine.step()

    assert machine.scheduler.running == [long]
    assert len(long.tables[0]) == 1


def test_a_request_that_leaves_no_room_is_let_in_only_while_no_other_runs() -> None:  # S21
    machine = Machine()
    alone = machine.ask(text(1, 150), max_tokens=10)
    small = machine.ask(text(2, 20), max_tokens=10)

    machine.step()

    assert machine.scheduler.running == [alone]
    assert list(machine.scheduler.waiting) == [small]
    machine.finish()
    again = machine.ask(text(3, 150), max_tokens=10)
    machine.step()
    assert machine.scheduler.running == [again]


def test_a_request_that_could_not_run_even_alone_is_refused() -> None:  # S19
    machine = Machine()

    with pytest.raises(ValueError, match="need 11 blocks, the device holds 10"):
        machine.ask(text(1, 151), max_tokens=10)


def test_a_reset_is_refused_while_a_request_runs_or_waits_for_its_blocks() -> None:  # S12
    machine = with_tiers()
    stored = machine.answer(text(1, 64))
    machine.push_out(stored)
    parked = machine.ask(text(1, 65), max_tokens=2)
    machine.step()

    assert machine.scheduler.promoting == [parked]
    assert not machine.cache.reset()
    machine.settle()
    machine.step()
    assert machine.scheduler.running == [parked]
    assert not machine.cache.reset()
    machine.finish()
    assert machine.cache.reset()


# --- what is computed, what is named


def test_an_answer_takes_a_slot_for_each_block_and_names_it_when_it_is_full() -> None:  # S17
    machine = Machine()
    request = machine.ask([*C, *[3] * 7])

    grown = []
    for _ in range(1 + 23):
        machine.step()
        named = [machine.pools[0].name(slot) is not None for slot in request.tables[0]]
        grown.append((request.num_computed, request.tables[0].tolist(), sum(named)))

    assert grown[0] == (55, [0, 1, 2, 3], 3)
    assert grown[4] == (59, [0, 1, 2, 3], 3)
    assert grown[8] == (63, [0, 1, 2, 3], 3)
    assert grown[9] == (64, [0, 1, 2, 3], 4)
    assert grown[10] == (65, [0, 1, 2, 3, 4], 4)
    assert grown[23] == (78, [0, 1, 2, 3, 4], 4)


def test_a_block_whose_last_token_is_sampled_but_not_computed_has_no_name() -> None:  # S18: of what is not kept
    machine = Machine()
    request = machine.ask(text(1, 47))

    machine.step()

    assert len(request.token_ids) == 48
    assert machine.pools[0].num_named == 2
    assert machine.cache.lookup(request.chain, 100).num_tokens == 32
    machine.step()
    assert machine.pools[0].num_named == 3


def test_a_prompt_computed_in_chunks_is_named_chunk_by_chunk_with_its_parents() -> None:  # S47
    machine = Machine(prefill_chunk=24)
    request = machine.ask(text(1, 70))

    for _ in range(3):
        machine.step()

    names = request.chain.names
    assert machine.log.take() == [
        BlockStored(Tier.DEVICE, 0, names[:1], 16, None, text(1, 16), 0),
        BlockStored(Tier.DEVICE, 0, names[1:3], 16, names[0], text(1, 48)[16:], 16),
        BlockStored(Tier.DEVICE, 0, names[3:4], 16, names[2], text(1, 64)[48:], 48),
    ]


def test_the_same_prompt_in_the_same_step_finds_nothing_yet_and_is_kept_once() -> None:  # S46
    machine = Machine()
    one, two = machine.ask(C), machine.ask(C)

    assert machine.step() == [(one, 48), (two, 48)]

    assert (one.tokens.device, two.tokens.device) == (0, 0)
    assert one.tables == two.tables
    assert machine.pools[0].num_named == 3
    assert machine.cache.free_slots() == [7]
    machine.scheduler.abort(one)
    machine.cache.check()
    machine.step()
    assert machine.holders(two)[:3] == [0, 1, 2]


def test_the_same_prompt_a_step_later_finds_what_the_first_has_computed_when_it_is_its_turn() -> None:  # S46
    machine = Machine(num_slots=20, prefill_chunk=32)
    first = machine.ask([*C, *text(1, 40)])
    machine.step()
    second = machine.ask([*C, *text(1, 40)])

    steps = [machine.step() for _ in range(2)]

    assert steps == [[(first, 32)], [(first, 24), (second, 24)]]  # less than a chunk is not waited for
    assert second.tokens.device == 64
    assert first.tables[0][:4] == second.tables[0][:4]
    assert machine.holders(first)[:5] == first.tables[0][:5].tolist() == second.tables[0][:5].tolist()


def test_one_that_does_not_read_the_cache_computes_all_and_is_in_no_hit_ratio() -> None:  # S16
    machine = Machine()
    machine.answer(C)
    before = machine.scheduler.hit_ratio.statistics()

    request = machine.ask(C, max_tokens=3, reads_cache=False)
    step = machine.step()

    assert step == [(request, 48)]
    assert request.tables[0].tolist()[:3] == [0, 1, 2]  # computed elsewhere, then the ones that were there
    assert request.tokens.reasons == {Reason.SKIPPED: 32, Reason.LAST_BLOCK: 16}
    assert machine.scheduler.hit_ratio.statistics() == before


def test_hits_are_counted_in_tokens_when_a_request_is_let_in() -> None:  # S16
    machine = Machine()
    machine.answer([*C, 5])
    machine.ask([*C, 6, 7])

    machine.step()

    counted = machine.scheduler.hit_ratio.statistics()
    assert (counted.num_requests, counted.queries, counted.hits) == (2, 49 + 50, 48)


def test_a_preempted_request_finds_its_own_blocks_again_and_is_counted_apart() -> None:
    machine = Machine(num_slots=9)
    old, young = machine.ask(text(1, 60), max_tokens=30), machine.ask(text(2, 60), max_tokens=70)

    preempted = None
    for _ in range(300):
        if young in machine.scheduler.waiting and young.generated and preempted is None:
            preempted = young.num_computed, len(young.token_ids)
        if not machine.scheduler.has_work:
            break
        machine.step()

    counted = machine.scheduler.hit_ratio.statistics()
    assert preempted is not None
    assert preempted[0] == 0
    assert preempted[1] > 60
    assert (old.finish_reason, young.finish_reason) == (FinishReason.LENGTH, FinishReason.LENGTH)
    assert (counted.num_requests, counted.queries, counted.hits) == (2, 120, 0)
    assert counted.num_preempted > 0
    assert counted.preempted_hits > 0
    assert machine.scheduler.admitted_tokens.num_tokens == 120


# --- parts of blocks


def test_a_prompt_that_ends_with_a_block_and_comes_again_costs_one_token() -> None:  # S7
    machine = Machine()
    machine.answer(C)

    again = machine.ask(C)

    assert machine.step() == [(again, 1)]
    assert (again.tokens.device, again.tokens.copied) == (47, 15)
    assert again.tables[0].tolist() == [0, 1, 2]


def test_a_prompt_that_diverges_inside_a_block_of_a_running_request_shares_up_to_there() -> None:
    machine = Machine(FULL_AND_WINDOW, num_slots=20)
    first = machine.ask(text(1, 60))
    machine.step()

    second = machine.ask(text(1, 41) + text(2, 20))

    assert machine.step() == [(first, 1), (second, 20)]
    assert (second.tokens.device, second.tokens.copied) == (41, 9)
    assert first.tables[0][2] != second.tables[0][2]


def test_the_next_turn_of_a_chat_computes_its_own_tokens_and_the_last_of_the_answer() -> None:
    machine = Machine(num_slots=20)
    first = machine.answer(text(1, 43), max_tokens=30)

    turn = machine.ask([*first.token_ids, *text(2, 11)])

    assert machine.step() == [(turn, 1 + 11)]
    assert turn.tokens.device == 72
    assert turn.tokens.copied == 8


def test_what_an_aborted_request_has_computed_is_found_to_the_token() -> None:
    machine = Machine(num_slots=20, prefill_chunk=21)
    aborted = machine.ask(text(1, 120))
    machine.step()
    machine.step()
    machine.scheduler.abort(aborted)

    again = machine.ask(text(1, 120))
    machine.step()

    assert again.tokens.device == 42


def test_a_request_that_was_aborted_before_it_was_let_in_leaves_nothing() -> None:
    machine = Machine()
    machine.scheduler.abort(machine.ask(text(1, 40)))

    machine.step()

    assert machine.pools[0].num_named == 0
    assert machine.cache.free_slots() == [10]


# --- groups that forget


def test_a_window_s_passed_blocks_are_freed_while_the_answer_grows_and_stay_findable() -> None:  # S37, S49
    machine = Machine(FULL_AND_WINDOW, num_slots=20)
    request = machine.ask(C, max_tokens=60)
    for _ in range(40):
        machine.step()

    table = request.tables[1].tolist()

    assert request.num_computed == 87
    assert table[:3] == [-1, -1, -1]
    assert -1 not in table[3:]
    assert machine.pools[1].num_leases == 3
    assert None not in machine.holders(request, 1)[:5]


@pytest.mark.parametrize("prefill_chunk", [16, 24, 512])
def test_with_retention_0_the_end_of_a_prompt_is_kept_however_it_was_cut(prefill_chunk: int) -> None:  # S43, S45
    machine = Machine(FULL_AND_WINDOW, num_slots=20, prefill_chunk=prefill_chunk, retention_tokens=0)

    first = machine.answer(text(1, 100), max_tokens=20)

    assert [slot is not None for slot in machine.holders(first, 1)] == [False] * 4 + [True] * 2 + [False]
    assert machine.answer(text(1, 100)).tokens.device == 96


def test_with_retention_0_a_prefix_that_comes_a_second_time_is_resumed_at_the_third() -> None:  # S43, S44
    machine = Machine(FULL_AND_WINDOW, num_slots=40, prefill_chunk=24, retention_tokens=0)

    hits = [machine.answer(text(1, 64) + text(seed, 40)).tokens.device for seed in (2, 3, 4, 5)]

    assert hits == [0, 0, 64, 64]


# --- blocks that come from below


def test_a_request_whose_blocks_are_on_their_way_computes_nothing_and_others_go_on() -> None:  # S22, S64
    machine = with_tiers()
    stored = machine.answer(text(1, 64))
    machine.push_out(stored)
    free = machine.cache.free_slots()[0]
    running = machine.ask(text(2, 20))
    parked, late = machine.ask(text(1, 80)), machine.ask(text(3, 20))

    steps = [machine.step() for _ in range(3)]

    assert steps == [[(running, 20), (late, 20)], [(running, 1), (late, 1)], [(running, 1), (late, 1)]]
    assert machine.scheduler.promoting == [parked]
    assert machine.cache.free_slots() == [free - 4 - 2 - 2]  # its four slots are held
    assert machine.holders(parked)[:4] == [None] * 4
    machine.settle()
    assert (parked, 16) in machine.step()
    assert None not in machine.holders(parked)[:4]
    assert (parked.tokens.host, parked.tokens.recomputed) == (64, 16)


def test_a_hit_is_partly_on_the_device_and_partly_on_disk() -> None:  # S23
    machine = with_tiers(num_slots=20)
    stored = machine.answer(text(1, 96))
    machine.push_out(stored, Tier.DISK)
    machine.answer(text(1, 32), reads_cache=False)
    request = machine.ask(text(1, 100))

    machine.step()
    machine.settle()
    machine.settle()
    step = machine.step()

    assert step == [(request, 4)]
    assert (request.tokens.device, request.tokens.disk, request.tokens.recomputed) == (32, 64, 4)


def test_two_that_wait_for_the_same_blocks_have_them_brought_up_once() -> None:  # S62
    machine = with_tiers()
    stored = machine.answer(text(1, 64))
    machine.push_out(stored)
    one, two = machine.ask(text(1, 80)), machine.ask(text(1, 80))
    machine.step()
    assert machine.scheduler.promoting == [one, two]

    machine.settle()
    machine.step()

    assert machine.cache.statistics().routes[Route.HOST_TO_DEVICE].num_bytes == 4 * 64
    assert one.tables == two.tables
    assert (one.tokens.host, two.tokens.host) == (64, 64)


def test_while_room_is_made_for_a_hit_running_requests_go_on_and_no_request_overtakes() -> None:  # S63: unlike vLLM
    machine = with_tiers(num_slots=12)
    stored = machine.answer(text(1, 64))
    machine.push_out(stored)
    running = machine.ask(text(2, 20))
    machine.step()
    machine.answer(text(3, 150))  # ten blocks in the way that have no copy below
    dropped = machine.cache.statistics().tiers[Tier.DEVICE].dropped_spills
    first, behind = machine.ask(text(1, 65)), machine.ask(text(4, 10))

    steps = [machine.step() for _ in range(2)]

    assert steps == [[(running, 1)], [(running, 1)]]
    assert list(machine.scheduler.waiting) == [first, behind]
    while first in machine.scheduler.waiting:
        assert behind in machine.scheduler.waiting
        machine.settle()
        assert (running, 1) in machine.step()
    assert machine.scheduler.promoting == [first]
    assert behind in machine.scheduler.running
    assert machine.cache.statistics().tiers[Tier.DEVICE].dropped_spills == dropped


def rot_in_host(machine: Machine, request: Request, block_id: int) -> None:
    host = machine.index.host
    assert host is not None
    slot = host[0].pool.find(request.chain.names[block_id])
    assert slot is not None
    machine.memories[0].host_block(slot)[5] ^= 1


def test_a_block_that_is_not_what_was_stored_shortens_the_hit_of_its_readers_only() -> None:  # S65
    machine = with_tiers()
    bad, good = machine.answer(text(1, 96)), machine.answer(text(2, 48))
    machine.push_out(good)
    machine.push_out(bad)
    rot_in_host(machine, bad, 4)
    reader, other = machine.ask(text(1, 97)), machine.ask(text(2, 49))

    machine.step()
    machine.settle()
    step = machine.step()

    assert step == [(reader, 97 - 64), (other, 1)]
    assert (reader.tokens.host, reader.tokens.reasons[Reason.CORRUPT]) == (64, 32)
    assert other.tokens.host == 48
    machine.finish()
    assert None not in machine.holders(reader)[:6]  # it is computed again, and found again


def test_a_block_that_rotted_in_host_memory_comes_from_disk_instead() -> None:  # S65: better than computing it
    machine = with_tiers()
    request = machine.answer(text(1, 96))
    machine.flush()
    machine.cache.residency.groups[0].slots.evict([0, 1, 2, 3, 4, 5], EvictionCause.ROOM)
    rot_in_host(machine, request, 4)
    reader = machine.ask(text(1, 97), max_tokens=2)

    machine.finish(reader)

    assert (reader.tokens.host, reader.tokens.disk, reader.tokens.recomputed) == (80, 16, 1)


def test_a_copy_that_fails_is_computed_in_all_groups_and_no_error() -> None:  # S66
    machine = with_tiers(FULL_AND_WINDOW)
    stored = machine.answer(text(1, 64))
    machine.push_out(stored)
    machine.lanes[Route.HOST_TO_DEVICE].failing = 1.0
    request = machine.ask(text(1, 70), max_tokens=3)

    machine.step()
    machine.settle()
    step = machine.step()

    assert step == [(request, 70)]
    assert request.tokens.reasons[Reason.FAILED] == 64
    machine.finish()
    assert machine.cache.free_slots() == [20, 20]


def test_slots_that_a_copy_writes_to_are_not_given_out_until_it_has_ended() -> None:  # S67
    machine = with_tiers(num_slots=6)
    stored = machine.answer(text(1, 64))
    machine.push_out(stored)
    request = machine.ask(text(1, 70), max_tokens=3)
    machine.step()
    assert machine.cache.free_slots() == [2]

    machine.scheduler.abort(request)

    assert machine.cache.free_slots() == [2]
    machine.cache.check()
    machine.settle()
    assert machine.cache.free_slots() == [6]
    machine.cache.check()
    assert machine.cache.lookups.where(stored.chain) == [Tier.DEVICE] * 4  # it has come, so it may be found


def test_slots_that_wait_for_the_disk_are_free_as_soon_as_no_request_wants_the_blocks() -> None:  # S67
    machine = with_tiers(num_slots=6)
    stored = machine.answer(text(1, 64))
    machine.push_out(stored, Tier.DISK)
    request = machine.ask(text(1, 70), max_tokens=3)
    machine.step()
    assert machine.cache.free_slots() == [2]

    machine.scheduler.abort(request)

    assert machine.cache.free_slots() == [6]
    machine.cache.check()
    machine.settle()
    machine.cache.check()
    assert machine.cache.lookups.where(stored.chain) == [Tier.HOST] * 4


# --- with a model


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def llm_of(name: str, tokenizer: PreTrainedTokenizerFast, folder: Path | None = None, **device: object) -> LLM:
    settings: dict[str, object] = {
        "device": {"capacity": 120 * BLOCK_SIZE * 1024, "block_size": BLOCK_SIZE, **device},
        "host": {"capacity": 120 * BLOCK_SIZE * 1024},
        "scheduler": {"prefill_chunk": 64, "token_budget": 128, "load": "always"},
    }
    if folder is not None:
        settings["disk"] = {"path": str(folder / "store"), "capacity": "64MiB"}
    return LLM(build(name), settings, tokenizer)


def greedy(num_tokens: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_prompts_that_share_whole_and_parts_of_blocks_get_the_answers_of_being_alone(
    name: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    stem = prompt_of(1, 100)
    prompts = [stem[:96], stem[:96], stem[:90] + prompt_of(2, 30), stem + prompt_of(3, 3), stem[:5], stem[:64]]
    model = build(name)
    expected = [plain_greedy(model, prompt, 12) for prompt in prompts]

    with llm_of(name, tokenizer) as llm:
        one_by_one = [llm.generate(prompt, greedy())[0] for prompt in prompts]
        at_once = llm.generate(prompts, greedy())
        llm.check()

    assert [completion.token_ids for completion in one_by_one] == expected
    assert [completion.token_ids for completion in at_once] == expected
    assert [completion.tokens.copied > 0 for completion in one_by_one] == [False, True, True, False, True, True]
    assert [completion.tokens.recomputed for completion in one_by_one[:2]] == [96, 1]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_twins_in_one_step_get_the_answer_of_being_alone(name: str, tokenizer: PreTrainedTokenizerFast) -> None:  # S46
    prompt = prompt_of(1, 48)
    expected = plain_greedy(build(name), prompt, 12)

    with llm_of(name, tokenizer) as llm:
        twins = llm.generate([prompt, prompt], greedy())
        llm.check()

    assert [twin.token_ids for twin in twins] == [expected, expected]


def test_a_chat_of_a_model_with_windows_goes_on_where_it_was(tokenizer: PreTrainedTokenizerFast) -> None:
    question, more = prompt_of(1, 60), prompt_of(2, 9)
    model = build("gemma3")
    answer = plain_greedy(model, question, 40)
    expected = plain_greedy(model, [*question, *answer, *more], 12)

    with llm_of("gemma3", tokenizer) as llm:
        first = llm.generate(question, greedy(40))[0]
        turn = llm.generate([*question, *answer, *more], greedy())[0]

    assert (first.token_ids, turn.token_ids) == (answer, expected)
    assert turn.tokens.recomputed == 1 + 9


def test_with_retention_0_a_model_with_windows_answers_the_same_and_the_same_prompt_is_found(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:  # S43
    stem = prompt_of(1, 100)
    prompts = [stem + prompt_of(seed, 30) for seed in (2, 3, 4)]
    model = build("gemma3")
    expected = [plain_greedy(model, prompt, 12) for prompt in [*prompts, prompts[0]]]

    with llm_of("gemma3", tokenizer, tmp_path, retention_tokens=0) as llm:
        completions = [llm.generate(prompt, greedy())[0] for prompt in [*prompts, prompts[0]]]
    with llm_of("gemma3", tokenizer, tmp_path, retention_tokens=0) as llm:
        restarted = llm.generate(prompts[0], greedy())[0]

    assert [completion.token_ids for completion in completions] == expected
    assert [completion.tokens.device for completion in completions[:2]] == [0, 0]
    assert completions[2].tokens.device == 96 + completions[2].tokens.copied
    assert completions[3].tokens.device == 129
    assert restarted.token_ids == expected[0]
    assert restarted.tokens.disk == 128
