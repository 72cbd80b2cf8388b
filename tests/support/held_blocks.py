"""What is held, and where blocks are, as tests of pins and mishaps ask it."""

from chaos import World
from small_cache import DOCUMENT, read

from kvtier.tiers.holds import Hold
from kvtier.tiers.naming.tier import Tier


def held(w: World, document: str, num_tokens: int = DOCUMENT) -> Hold:
    hold = w.cache.hold(w.chain(document, num_tokens), num_tokens)
    assert hold is not None
    return hold


def until_whole(w: World, hold: Hold) -> None:
    for _ in range(50):
        w.clock.now += 0.1
        w.settle()
        w.check()
        if hold.is_whole:
            return
    raise AssertionError("what is held never came")


def host_blocks(w: World, document: str) -> int:
    host = w.cache._residency.host
    assert host is not None
    return sum(host.pools[0].find(name) is not None for name in w.names(document, DOCUMENT))


def on_disk_only(w: World, document: str) -> None:
    read(w, document)
    w.flush()
    others = iter("mnopqrstuvwxyz")
    while any(tier is not Tier.DISK for tier in w.cache.where(w.chain(document, DOCUMENT))):
        read(w, next(others))
    assert host_blocks(w, document) == 0
