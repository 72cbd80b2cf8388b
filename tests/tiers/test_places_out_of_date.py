"""A host slot that a look-up found a block in may have another block by the time a hit is used."""

from chaos import World
from small_cache import DOCUMENT, read, world

from kvtier.tiers.lower.lower_tiers import Places
from kvtier.tiers.up.promotion import Hit


def hit_in_host(w: World) -> Hit:
    """A hit on a document that is in host memory and not on the device."""
    for document in "abc":
        read(w, document)
    hit = w.cache.lookup(w.chain("a", DOCUMENT), DOCUMENT + 1)
    assert (places_of(hit) >= 0).all()
    return hit


def places_of(hit: Hit) -> Places:
    (places,) = hit.below
    assert len(places) == hit.num_blocks
    return places


def test_a_promotion_of_a_hit_that_is_out_of_date_brings_no_other_block() -> None:
    w = world(num_device_slots=16, num_host_slots=24)
    hit = hit_in_host(w)
    for document in "defgh":
        read(w, document)
    pool = w.index.host[0].pool
    now_there = [pool.name(slot) for slot in places_of(hit).tolist()]
    assert None not in now_there, "the slots are blank: a stale place would lease nothing that has a digest"
    assert not set(now_there) & set(hit.chain.names)

    promotion = w.cache.promote(hit)
    w.settle()

    assert promotion.done
    w.check()  # each block that is found on the device has its own bytes


def test_a_hit_that_is_out_of_date_makes_no_other_block_the_last_to_be_evicted() -> None:
    w = world(num_device_slots=16, num_host_slots=24)
    hit = hit_in_host(w)
    for document in "defgh":
        read(w, document)
    order = w.index.host[0].pool.cached_slots()
    assert set(places_of(hit).tolist()) & set(order[: len(order) // 2])

    w.cache._promoter.keep_warm(hit)  # noqa: SLF001  `make_room` does so only while it waits for copies

    assert w.index.host[0].pool.cached_slots() == order
