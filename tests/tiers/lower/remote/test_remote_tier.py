"""A remote tier below host memory and disk: what is asked, read and put, and what its failures cost."""

import random
from collections.abc import Callable, Sequence

import pytest
from chaos import NAMESPACE, World
from memory_remote import MemoryRemote
from small_cache import BLOCK_SIZE, DOCUMENT, compute_and_leave, world

from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import Fault
from kvtier.store.remote.sealed_remote import SealedRemote
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.breaker import HUNG_S, BreakerState
from kvtier.tiers.lower.name_set import block_key
from kvtier.tiers.lower.remote.inquiries import ANSWER_S
from kvtier.tiers.lower.remote.presence import ABSENT_LASTS_S, LASTS_S
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics, remote_of_all
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.groups import FullAttention, SlidingWindow
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.tiers.up.load_planner import LoadPlanner
from kvtier.tiers.up.prefill_speed import PrefillSpeed
from kvtier.transfer.transfer_engine import Route

NUM_BLOCKS = DOCUMENT // BLOCK_SIZE
Values = dict[bytes, bytes]


def machine(values: Values, store: MemoryStore | None = None, **options: object) -> World:
    """One machine of those that share *values*: its own device, host memory and disk."""
    return world(store=store, remote=SealedRemote(MemoryRemote(values)), **options)


def ask(w: World, document: str, num_tokens: int = DOCUMENT + 1, is_answered: bool = True) -> TokenBalance:
    """Answer a prompt as an engine does: ask, look up, promote, compute the rest, leave."""
    chain = w.chain(document, num_tokens)
    inquiry = w.cache.lookups.inquire(chain, num_tokens)
    if is_answered:
        w.settle()
    assert inquiry.is_done
    hit = w.cache.lookup(chain, num_tokens)
    while not w.cache.make_room(hit):
        w.settle()
    promotion = w.cache.promote(hit, timeout_s=5)
    w.settle()
    assert promotion.done
    balance = promotion.balance(num_tokens)
    compute_and_leave(w, promotion, chain)
    for _ in range(3):
        w.cache.spill()
        w.settle()
    w.check()
    return balance


def remote(w: World) -> RemoteStatistics:
    found = w.cache.statistics().remote
    assert found is not None
    return found


def key(w: World, document: str, block: int) -> bytes:
    return block_key(NAMESPACE, 0, w.names(document, DOCUMENT)[block])


def shared(document: str = "a") -> Values:
    """What is there after one machine has used a document twice."""
    values: Values = {}
    first = machine(values)
    for each in (document, "other", document):  # the device holds one and a half of them
        ask(first, each)
    assert len(values) == NUM_BLOCKS
    return values


def test_a_document_that_was_used_twice_is_a_hit_on_another_machine() -> None:
    second = machine(shared())

    balance = ask(second, "a")

    assert (balance.remote, balance.recomputed) == (DOCUMENT, 1)
    assert remote(second).num_asked == 1
    assert ask(second, "a").device == DOCUMENT  # from then on it goes on as any


def test_what_was_used_once_is_not_put() -> None:
    values: Values = {}
    w = machine(values)

    for document in "abcd":
        ask(w, document)

    assert not values


def test_what_was_computed_twice_since_nothing_here_had_room_for_it_is_put() -> None:
    values: Values = {}
    w = machine(values, MemoryStore(0), num_device_slots=12, num_host_slots=12)

    for document in "abc":
        ask(w, document)
    assert not values
    again = ask(w, "a")

    assert again.recomputed > DOCUMENT / 2
    assert key(w, "a", 0) in values
    ask(w, "b")
    assert ask(w, "a").remote > 0


def test_what_comes_from_there_goes_to_this_machines_disk_and_is_not_put_again() -> None:
    values = shared()
    second = machine(values)
    ask(second, "a")
    written = remote(second).usage.num_writes

    for document in ("b", "c", "a", "a"):
        ask(second, document)

    assert second.store is not None
    assert second.store.contains(key(second, "a", 0))
    assert remote(second).usage.num_writes == written == 0


def test_a_prompt_that_nobody_has_seen_is_one_question_and_then_none_for_a_while() -> None:
    w = machine({})

    ask(w, "a", is_answered=True)
    num_questions = remote(w).usage.num_questions
    w.evict_blocks(w.names("a", DOCUMENT))
    assert w.store is not None
    w.store.delete(list(w.store.keys()))

    assert w.cache.lookups.inquire(w.chain("a", DOCUMENT + 1), DOCUMENT + 1).is_done
    assert remote(w).usage.num_questions == num_questions
    w.clock.now += ABSENT_LASTS_S
    assert not w.cache.lookups.inquire(w.chain("a", DOCUMENT + 1), DOCUMENT + 1).is_done


def test_a_group_that_forgets_is_asked_only_for_what_a_longer_hit_reads() -> None:
    groups = [FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 2 * BLOCK_SIZE)]
    client = SealedRemote(MemoryRemote({}))
    w = World(groups, [64, 64], 60, 40, MemoryStore(1 << 20), random.Random(1), remote=client)
    ask(w, "a")
    num_questions = remote(w).usage.num_questions

    again, longer = DOCUMENT + 1, DOCUMENT + 5 * BLOCK_SIZE + 1
    assert w.cache.lookups.inquire(w.chain("a", again), again).is_done
    w.cache.lookups.inquire(w.chain("a", longer), longer)
    w.settle()

    # Five new blocks of each group, and the block before them, which the window reads after one more block.
    assert remote(w).usage.num_questions == num_questions + 5 + 6


def test_blocks_of_one_group_are_not_asked_for_because_another_group_lacks_its_own() -> None:
    groups = [FullAttention(BLOCK_SIZE), FullAttention(BLOCK_SIZE)]
    w = World(groups, [64, 64], 60, 40, MemoryStore(0), random.Random(1), remote=SealedRemote(MemoryRemote({})))
    ask(w, "a")
    assert w.host is not None
    for slots in (w.cache.residency.groups[0].slots, w.host[0]):
        found = slots.pool.find_all(w.names("a", DOCUMENT)[4:])
        slots.evict(found[found != ABSENT], EvictionCause.ROOM)
    num_questions = remote(w).usage.num_questions

    w.cache.lookups.inquire(w.chain("a", DOCUMENT + 1), DOCUMENT + 1)
    w.settle()

    assert remote(w).usage.num_questions == num_questions + NUM_BLOCKS - 4


def test_what_could_not_be_asked_is_asked_again_at_once() -> None:
    class OneNodeAway(MemoryRemote):
        away: frozenset[bytes] = frozenset()

        def exist_many(self, keys: Sequence[bytes], apart: bool = False) -> list[bool | None]:
            there = super().exist_many(keys, apart)
            return [None if key in self.away else is_there for key, is_there in zip(keys, there, strict=True)]

    store = OneNodeAway(shared())
    w = world(remote=SealedRemote(store))
    store.away = frozenset([key(w, "a", 3)])
    while_away = ask(w, "a")
    w.evict_blocks(w.names("a", DOCUMENT))
    assert w.store is not None
    w.store.delete(list(w.store.keys()))

    inquiry = w.cache.lookups.inquire(w.chain("a", DOCUMENT + 1), DOCUMENT + 1)
    store.away = frozenset()
    w.settle()

    assert while_away.remote == 3 * BLOCK_SIZE
    assert inquiry.is_done
    assert remote(w).num_asked == 2
    assert remote(w).known_blocks == NUM_BLOCKS


def test_nothing_is_asked_about_what_local_tiers_have() -> None:
    w = machine({})
    ask(w, "a")

    inquiry = w.cache.lookups.inquire(w.chain("a", DOCUMENT + 1), DOCUMENT + 1)

    assert inquiry.is_done
    assert remote(w).num_asked == 1


def test_requests_for_one_document_share_a_question() -> None:
    w = machine(shared())
    w.settle()
    chain = w.chain("a", DOCUMENT + 1)

    inquiries = [w.cache.lookups.inquire(chain, DOCUMENT + 1) for _ in range(5)]
    w.settle()

    assert all(inquiry.is_done for inquiry in inquiries)
    assert remote(w).num_asked == 1


def test_an_answer_is_waited_for_a_moment_and_serves_those_that_come_later() -> None:
    w = machine(shared())
    w.settle()
    inquiry = w.cache.lookups.inquire(w.chain("a", DOCUMENT + 1), DOCUMENT + 1)
    w.clock.now += ANSWER_S * 0.9
    w.cache.poll()
    assert not inquiry.is_done

    w.clock.now += ANSWER_S * 0.2
    w.cache.poll()

    assert inquiry.is_done
    assert w.cache.lookup(w.chain("a", DOCUMENT + 1), DOCUMENT + 1).num_tokens == 0
    assert (remote(w).num_late, remote(w).breakers["ask"]) == (1, BreakerState.OPEN)
    w.settle()  # there it is
    assert w.cache.lookup(w.chain("a", DOCUMENT + 1), DOCUMENT + 1).num_tokens == DOCUMENT


def test_while_it_does_not_answer_nobody_waits_and_it_is_tried_again() -> None:
    w = machine(shared())
    w.settle()
    w.cache.lookups.inquire(w.chain("b", DOCUMENT + 1), DOCUMENT + 1)
    w.clock.now += 2 * ANSWER_S
    w.cache.poll()

    assert w.cache.lookups.inquire(w.chain("a", DOCUMENT + 1), DOCUMENT + 1).is_done
    w.settle()  # its owner hears at last
    assert remote(w).breakers["ask"] is BreakerState.OPEN
    w.clock.now += 2
    w.settle()

    assert remote(w).breakers["ask"] is BreakerState.CLOSED
    assert ask(w, "a").remote == DOCUMENT


def test_answers_that_wait_for_an_owner_who_was_away_are_not_late() -> None:
    w = machine(shared())
    w.settle()
    inquiry = w.cache.lookups.inquire(w.chain("a", DOCUMENT + 1), DOCUMENT + 1)
    w.asks[0].stir(1.0)

    w.clock.now += 10
    w.cache.poll()

    assert inquiry.is_done
    assert remote(w).breakers["ask"] is BreakerState.CLOSED


def test_a_store_that_is_away_from_the_start_costs_nobody_anything() -> None:
    gone = MemoryRemote()
    gone.close()
    w = world(remote=SealedRemote(gone))
    for _ in range(5):
        w.settle()

    for document in "aabbaa":
        balance = ask(w, document, is_answered=False)
        assert balance.remote == 0
        assert balance.num_tokens == DOCUMENT + 1

    assert remote(w).num_late == 0
    assert remote(w).breakers["ask"] is not BreakerState.CLOSED
    assert remote(w).why_failed["ask"] == "the store is closed"


def flipped(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


FOUL: dict[str, tuple[Callable[[Values, bytes], bytes], Fault]] = {
    "a flipped byte": (lambda values, own: flipped(values[own]), Fault.CORRUPT),
    "another block's record": (
        lambda values, own: next(value for k, value in values.items() if k != own),
        Fault.CORRUPT,
    ),
    "another namespace's": (lambda values, own: values[own][:17] + b"m" * 16 + values[own][33:], Fault.FOREIGN),
    "an old record": (lambda values, own: values[own][:4] + b"\1\0" + values[own][6:], Fault.VERSION),
    "half of it": (lambda values, own: values[own][:100], Fault.TORN),
}


@pytest.mark.parametrize("foul", FOUL)
def test_a_foul_record_is_refused_counted_computed_anew_and_written_over(foul: str) -> None:
    values = shared()
    second = machine(values)
    change, fault = FOUL[foul]
    good = dict(values)
    values[key(second, "a", 4)] = change(values, key(second, "a", 4))

    balance = ask(second, "a")

    assert balance.remote == 4 * BLOCK_SIZE
    assert balance.reasons[Reason.CORRUPT] > 0
    assert remote(second).faults == {fault.value: 1}
    assert second.cache.statistics().tiers[Tier.REMOTE].corrupt == {fault.value: 1}
    for document in ("b", "a"):
        ask(second, document)
    assert values == good


def test_what_others_have_evicted_meanwhile_is_a_miss() -> None:
    values = shared()
    second = machine(values)
    second.settle()
    chain = second.chain("a", DOCUMENT + 1)
    second.cache.lookups.inquire(chain, DOCUMENT + 1)
    second.settle()
    values.clear()

    promotion = second.cache.promote(second.cache.lookup(chain, DOCUMENT + 1))
    second.settle()

    assert promotion.done
    balance = promotion.balance(DOCUMENT + 1)
    assert (balance.remote, balance.reasons.get(Reason.EVICTED_FROM_REMOTE)) == (0, DOCUMENT)
    assert second.cache.lookup(chain, DOCUMENT + 1).num_tokens == 0
    second.cache.release(promotion.tables)
    second.check()


def test_a_read_that_hangs_ends_with_its_deadline_and_reading_is_tried_without_a_request() -> None:
    second = machine(shared())
    second.settle()
    chain = second.chain("a", DOCUMENT + 1)
    second.cache.lookups.inquire(chain, DOCUMENT + 1)
    second.settle()
    promotion = second.cache.promote(second.cache.lookup(chain, DOCUMENT + 1), timeout_s=1)
    hanging = second.lanes[Route.REMOTE_TO_HOST].held
    second.lanes[Route.REMOTE_TO_HOST].held = []

    second.clock.now += 1
    second.cache.poll()

    assert promotion.done
    assert promotion.num_tokens == 0
    assert remote(second).breakers["read"] is BreakerState.OPEN
    second.cache.release(promotion.tables)
    assert second.cache.lookups.inquire(chain, DOCUMENT + 1).is_done  # nobody waits while it cannot be read
    assert second.cache.lookup(chain, DOCUMENT + 1).num_tokens == 0
    second.clock.now += HUNG_S
    second.lanes[Route.REMOTE_TO_HOST].held += hanging
    second.settle()
    second.settle()
    assert remote(second).breakers["read"] is BreakerState.CLOSED
    assert ask(second, "a", is_answered=False).remote + ask(second, "a").device > 0


def test_a_store_that_takes_nothing_is_left_alone() -> None:
    class Full(MemoryRemote):
        def put_many(self, records: object) -> list[bool]:  # type: ignore[override]
            return [False] * len(records)  # type: ignore[arg-type]

    w = world(num_host_slots=80, remote=SealedRemote(Full()))

    for document in "abcdeabcde":
        ask(w, document)

    assert remote(w).num_stored == 0
    assert remote(w).num_refused > 0
    assert remote(w).num_opened["write"] > 0
    assert "takes no block" in remote(w).why_failed["write"]


def test_a_reset_forgets_what_was_known_and_leaves_what_is_others_too() -> None:
    values = shared()
    second = machine(values)
    ask(second, "a")

    assert second.cache.reset()

    assert remote(second).known_blocks == 0
    assert len(values) == NUM_BLOCKS
    assert ask(second, "a").remote == DOCUMENT


def test_answers_are_not_believed_for_ever() -> None:
    second = machine(shared())
    second.settle()
    chain = second.chain("a", DOCUMENT + 1)
    second.cache.lookups.inquire(chain, DOCUMENT + 1)
    second.settle()
    assert second.cache.lookups.where(chain) == [Tier.REMOTE] * NUM_BLOCKS

    for document in "bc":
        second.clock.now += LASTS_S + 1
        ask(second, document)
        ask(second, f"other than {document}")
        ask(second, document)

    assert second.cache.lookups.where(chain) == [None] * NUM_BLOCKS


def test_what_is_loaded_is_chosen_by_the_stores_own_speed() -> None:
    planner = LoadPlanner(prefill := PrefillSpeed(), 64, lambda: 0.0)
    second = machine(shared(), planner=planner)
    second.settle()
    for _ in range(3):
        prefill.on_computed(64, 0, 0.64)  # a token takes 10 ms, so the question is worth it on a busy machine too
    speed = second.transfers.speed(Route.REMOTE_TO_HOST)
    chain = second.chain("a", DOCUMENT + 1)
    second.cache.lookups.inquire(chain, DOCUMENT + 1)
    second.settle()  # measures how long the question took
    hit = second.cache.lookup(chain, DOCUMENT + 1)
    assert hit.num_tokens == DOCUMENT

    speed.latency_s = 1e-6
    speed.take_over(1.0, 0.0)  # a byte a second
    assert second.cache.plans.plan_load(hit, DOCUMENT + 1).num_tokens == 0
    speed.take_over(1e12, 0.0)
    assert second.cache.plans.plan_load(hit, DOCUMENT + 1).num_tokens == DOCUMENT
    speed.latency_s = 1.0
    assert second.cache.plans.plan_load(hit, DOCUMENT + 1).num_tokens == 0


def test_what_is_computed_sooner_than_asked_is_not_asked_about() -> None:
    planner = LoadPlanner(prefill := PrefillSpeed(), 64, lambda: 0.0)
    w = machine({}, planner=planner)
    w.settle()
    for _ in range(3):
        prefill.on_computed(64, 0, 64e-6)
    w.transfers.speed(Route.REMOTE_TO_HOST).latency_s = 1.0

    assert w.cache.lookups.inquire(w.chain("a", DOCUMENT + 1), DOCUMENT + 1).is_done
    assert remote(w).num_asked == 0


def test_several_tiers_of_one_store_are_told_of_as_one() -> None:
    one, other = machine(shared("a")), machine(shared("b"))
    ask(one, "a")
    ask(other, "b")
    gone = MemoryRemote()
    gone.close()
    failing = world(remote=SealedRemote(gone))
    failing.settle()

    whole = remote_of_all([remote(one), remote(other), remote(failing)])

    assert whole is not None
    assert whole.known_blocks == remote(one).known_blocks + remote(other).known_blocks
    assert whole.breakers["ask"] is remote(failing).breakers["ask"]
    assert whole.why_failed["ask"] == remote(failing).why_failed["ask"]
    assert remote_of_all([]) is None


@pytest.mark.parametrize("seed", range(3))
def test_machines_that_share_a_store_never_give_each_other_wrong_bytes(seed: int) -> None:
    rng, values = random.Random(seed), dict[bytes, bytes]()
    machines = [machine(values, num_host_slots=rng.choice([24, 40])) for _ in range(3)]
    from_remote = 0

    for _ in range(60):
        balance = ask(rng.choice(machines), rng.choice("abcdefgh"), rng.randrange(2, DOCUMENT + 2))
        from_remote += balance.remote
        if rng.random() < 0.2 and values:
            values.pop(rng.choice(list(values)))

    assert from_remote > 0
