"""What is held, and where blocks are, as tests of pins and mishaps ask it."""

from chaos import World
from small_cache import DOCUMENT, read

from kvtier.tiers.naming.tier import Tier
from kvtier.tiers.pins import Pin


def held(w: World, document: str, num_tokens: int = DOCUMENT) -> Pin:
    pin = w.cache.pins.pin(w.chain(document, num_tokens), num_tokens)
    assert pin is not None
    return pin


def until_whole(w: World, pin: Pin) -> None:
    for _ in range(50):
        w.clock.now += 0.1
        w.settle()
        w.check()
        if pin.is_whole:
            return
    raise AssertionError("what is held never came")


def host_blocks(w: World, document: str) -> int:
    host = w.index.host
    assert host is not None
    return sum(host[0].pool.find(name) is not None for name in w.names(document, DOCUMENT))


def on_disk_only(w: World, document: str) -> None:
    read(w, document)
    w.flush()
    others = iter("mnopqrstuvwxyz")
    while any(tier is not Tier.DISK for tier in w.cache.lookups.where(w.chain(document, DOCUMENT))):
        read(w, next(others))
    assert host_blocks(w, document) == 0
