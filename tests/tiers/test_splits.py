"""Split hits: the front is computed while the rest is loaded."""

from dataclasses import replace

from chaos import World
from small_cache import DOCUMENT, balance, read, world

from kvtier.tiers.naming.tier import Reason
from kvtier.tiers.up.promotion import NO_SLOT, Hit


def hit_below(w: World) -> Hit:
    """Document "a", of which at most the first blocks are on the device."""
    for document in "abc":
        read(w, document)
    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)
    assert hit.num_tokens == DOCUMENT
    return hit


def test_a_split_hit_brings_only_the_rest_and_says_that_the_front_was_computed() -> None:
    w = world(num_device_slots=16, num_host_slots=60)
    for document in "abc":
        read(w, document)
    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)
    assert hit.num_tokens == DOCUMENT
    on_device = w.cache.plans.on_device(hit).num_tokens
    start = on_device + 3 * w.cache.block_size

    front = w.cache.promote(w.cache.plans.on_device(hit))
    rest = w.cache.promote(replace(hit, start=start))
    w.settle()
    slots = w.cache.allocate([3])
    assert slots is not None
    front.tables[0].extend(slots[0])
    w.compute(front.tables, hit.chain, front.num_tokens, start)
    front.tables[0].extend(rest.tables[0][start // w.cache.block_size :])

    assert rest.done
    assert all(slot == NO_SLOT for slot in rest.tables[0][: start // w.cache.block_size])
    for slot, name in zip(front.tables[0], hit.chain.names, strict=False):
        assert (w.device[0][slot] == w.bytes_of(0, name)).all()
    assert balance(rest) == (on_device, DOCUMENT - start, 0, start - on_device + 1)
    assert rest.balance(DOCUMENT + 1).reasons == {Reason.COST: start - on_device, Reason.LAST_BLOCK: 1}
    w.check()
    w.cache.release(front.tables)
    w.check()


def test_a_rest_that_is_given_up_is_evicted_before_the_beginning_that_somebody_else_left_there() -> None:
    w = world(num_device_slots=24, num_host_slots=60)
    hit = hit_below(w)
    rest = w.cache.promote(replace(hit, start=DOCUMENT // 2))
    w.settle()
    read(w, "a", DOCUMENT // 2 + 1)

    w.cache.cancel(rest)

    w.check()


def test_a_rest_that_finds_too_few_free_slots_is_shorter_and_never_begins_before_its_start() -> None:
    w = world(num_device_slots=16, num_host_slots=60)
    hit = hit_below(w)
    for num_leased in (8, 16):
        leased = w.cache.allocate([num_leased])
        assert leased is not None
        rest = w.cache.promote(replace(hit, start=DOCUMENT // 2))
        w.settle()

        assert rest.num_tokens == {8: DOCUMENT, 16: DOCUMENT // 2}[num_leased]
        assert rest.balance(DOCUMENT + 1).num_tokens == DOCUMENT + 1
        w.cache.cancel(rest)
        w.cache.release(leased)
        w.check()
