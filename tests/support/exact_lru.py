"""An LRU cache of prefixes that is replayed block by block, and chats to replay."""

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvtier.tiers.naming.block_hash import BlockName


class ExactLru:
    """Finds the leading run of a prompt's blocks, and then has all of them; the tail goes first."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._names: OrderedDict[BlockName, None] = OrderedDict()

    def ask(self, names: Sequence[BlockName]) -> int:
        """How many leading blocks are found; then the prompt's blocks are the newest."""
        num_found = next((place for place, name in enumerate(names) if name not in self._names), len(names))
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._num_blocks:
            self._names.popitem(last=False)
        return num_found


def lru_hit_ratio(prompts: Iterable[Sequence[BlockName]], num_blocks: int) -> float:
    """The share of the prompts' blocks that a cache of that size finds."""
    cache, num_found, num_asked = ExactLru(num_blocks), 0, 0
    for names in prompts:
        num_found += cache.ask(names)
        num_asked += len(names)
    return num_found / num_asked


def chats(num_prompts: int, seed: int) -> list[list[BlockName]]:
    """Prompts of chats that go on for some turns, behind one of a few system prompts, and questions about documents of
    which some are popular. In all a block in four comes again."""
    rng = random.Random(seed)
    systems = [_new(rng, size) for size in (1, 4, 16)]
    books = [_new(rng, rng.randrange(20, 80)) for _ in range(60)]
    going: list[list[BlockName]] = []
    prompts = []
    for _ in range(num_prompts):
        if going and rng.random() < 0.6:
            place = min(len(going) - 1, int(rng.expovariate(1 / 30)))
            chat = going.pop(-1 - place)
        elif rng.random() < 0.2:
            chat = list(books[int(len(books) * rng.random() ** 2)])
        else:
            chat = list(rng.choice(systems))
        chat = chat + _new(rng, rng.randrange(2, 30))
        prompts.append(chat)
        if rng.random() < 0.7:
            going.append(chat)
    return prompts


def _new(rng: random.Random, num_blocks: int) -> list[BlockName]:
    return [BlockName(rng.randbytes(32)) for _ in range(num_blocks)]
