"""PromptPins: which prompts are kept, and what ending them costs each step."""

import random
from typing import Any

import numpy as np
import pytest
from chaos import FakeClock, World

from kvtier.engine.documents import prompt_pins
from kvtier.engine.documents.pin_shares import PinShares
from kvtier.engine.documents.prompt_pins import PromptPins
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS, BlockChain, ExtraKeys
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.pins import Pin

BLOCK_SIZE, BLOCK_BYTES = 4, 64


class Engine:
    """What pins ask of an engine: its cache, here one that knows which holds have not been ended, and names."""

    def __init__(self) -> None:
        world = World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 16, 64, MemoryStore(1 << 20), random.Random(1))
        self._cache = world.cache
        self.open: set[Pin] = set()

    @property
    def cache(self) -> "Engine":
        return self

    @property
    def pinnable_bytes(self) -> int:
        return self._cache.pinnable_bytes

    def pin(self, chain: BlockChain, num_tokens: int, most_bytes: int) -> Pin | None:
        pin = self._cache.pin(chain, num_tokens, most_bytes)
        if pin is not None:
            self.open.add(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        self._cache.unpin(pin)
        self.open.remove(pin)

    def chain(self, token_ids: list[int], extra: ExtraKeys) -> BlockChain:
        chain = BlockChain(BLOCK_SIZE, extra)
        chain.extend(np.array(token_ids))
        return chain


def test_a_prompt_shorter_than_a_block_is_not_pinned_and_leaves_nothing_behind() -> None:
    engine: Any = Engine()
    pins = PromptPins(PinShares(1), FakeClock())

    assert not any(pins.pin(engine, None, [1, 2, 3], NO_EXTRA_KEYS, 60.0) for _ in range(10))

    assert not engine.open
    assert pins.pin(engine, None, [1, 2, 3, 4], NO_EXTRA_KEYS, 60.0)
    assert len(engine.open) == 1


def test_pins_end_in_time_a_few_with_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_pins, "MOST_ENDED", 2)
    clock = FakeClock()
    engine: Any = Engine()
    pins = PromptPins(PinShares(1), clock)
    for number, ttl_s in enumerate([30.0, 10.0, 20.0, 10.0, 10.0]):
        assert pins.pin(engine, None, [number] * BLOCK_SIZE, NO_EXTRA_KEYS, ttl_s)

    left = []
    for now in (9.0, 10.0, 10.0, 10.0, 20.0, 30.0):
        clock.now = now
        pins.tick(engine)
        left.append(len(engine.open))

    assert left == [5, 3, 2, 2, 1, 0]
