"""How much of one big cache's hits do four replicas behind the router find, and what does choosing cost?

Replays a trace (--trace FILE, JSON lines: timestamp in ms, input_length, output_length, hash_ids of blocks of 512
tokens) in simulated time: the router's choice, index and policy are real, as are the pools of blocks, whose events go
to the index as they happen; a replica computes one prompt after the other. Beside it: one cache of all replicas' size,
round-robin, and consistent hashing alone. Chats that are made up are replayed too, before it.
"""

import heapq
import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median

import numpy as np
from exact_lru import chats

from bench.report import Row, arguments, publish
from bench.rounds import at_most
from kvtier.routing.config import IndexConfig, PolicyConfig
from kvtier.routing.fingerprints import Fingerprints, Prefixes
from kvtier.routing.kv_event import BlockRemoved, BlockStored, Event, EventBatch
from kvtier.routing.question import Question
from kvtier.routing.replica import Health, Replica, Work
from kvtier.routing.router import RoutedPrompt, Router
from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.naming.block_hash import BlockName

BLOCK_TOKENS = 512
NUM_REPLICAS = 4
TOKENS_PER_S = 10_000.0  # that a replica computes of prompts
SECONDS_PER_TOKEN = 0.02  # of an answer
EVENTS_S = 0.05  # from what happens in a replica until the router knows
MIN_OF_BIG, MIN_OF_ROUND_ROBIN = 0.95, 1.5
MAX_CHOOSING_MS = 2.0
PROMPT_BLOCKS = (200, 400, 800, 1600, 3200, 8000)  # of 16 tokens
QUICK_PROMPT_BLOCKS = (20, 40, 80, 160, 320, 800)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt of the trace. *blocks* are equal where all tokens up to their ends are."""

    at: float
    num_tokens: int
    num_answered: int
    blocks: Sequence[int]


@dataclass(slots=True)
class SimulatedReplica:
    """A real pool of blocks, and a queue of prompts that are computed one after the other."""

    pool: BlockPool
    tokens_per_s: float
    tell: Callable[[float, Event], None]
    free_at: float = 0.0
    num_hit: int = 0
    num_computed: int = 0
    waiting: deque[Asked] = field(default_factory=deque)

    def begin(self, asked: Asked, now: float) -> tuple[int, list[int]]:
        """Compute a prompt until `free_at`: how many of its blocks are found, and the slots that it leases."""
        names = [_name(block) for block in asked.blocks]
        found = self.pool.find_all(names[: (asked.num_tokens - 1) // BLOCK_TOKENS])
        num_found = next((i for i, slot in enumerate(found) if slot < 0), len(found))
        leased = [int(slot) for slot in found[:num_found]]
        self.pool.lease(leased)
        slots = leased + self._allocate(len(names) - num_found, now)
        self.num_hit += num_found * BLOCK_TOKENS
        num_missed = asked.num_tokens - num_found * BLOCK_TOKENS
        self.num_computed += num_missed
        self.free_at = now + num_missed / self.tokens_per_s
        return num_found, slots

    def finish(self, asked: Asked, num_found: int, slots: list[int], now: float) -> None:
        """The blocks that were computed can be found."""
        computed = asked.blocks[num_found : len(slots)]
        if computed:
            self.pool.commit(slots[num_found:], [_name(block) for block in asked.blocks[: len(slots)]], num_found)
            parent = _hash(asked.blocks[num_found - 1]) if num_found else None
            self.tell(now, BlockStored([_hash(block) for block in computed], parent, [*computed], 1))

    def release(self, slots: list[int]) -> None:
        """The answer has ended. The tail of the prompt is evicted first."""
        self.pool.release(slots[::-1])

    def _allocate(self, wanted: int, now: float) -> list[int]:
        """So many slots, or those there are: a prompt of which a part has no room is not kept to its end."""
        wanted = min(wanted, self.pool.num_free)
        if wanted <= self.pool.num_blank:
            return self.pool.allocate(wanted) or []
        slots, gone = self.pool.evict_and_lease(wanted, self.pool.order.victims(wanted - self.pool.num_blank))
        if gone:
            self.tell(now, BlockRemoved([int.from_bytes(name[-8:], "big") for name in gone]))
        return slots.tolist()


@dataclass(slots=True)
class Played:
    """What came of a trace."""

    num_hit: int
    computed: list[int]
    ttft_s: list[float]

    @property
    def balance(self) -> float:
        """How much more the busiest replica computed than all on average."""
        return max(self.computed) / (sum(self.computed) / len(self.computed))


class Way:
    """How prompts are spread; this one by turns."""

    def __init__(self, num_replicas: int) -> None:
        self._turns = cycle(range(num_replicas))

    def sent(self, _: Asked) -> int:
        """The replica for a prompt."""
        return next(self._turns)

    def began(self, asked: Asked) -> None:
        """Its answer begins."""

    def ended(self, asked: Asked) -> None:
        """Its answer has ended."""

    def told(self, replica: int, event: Event) -> None:
        """An event has come."""


class Routed(Way):
    """By the router: its index, ring and policy."""

    def __init__(self, num_replicas: int, policy: PolicyConfig, listens: bool = True) -> None:
        super().__init__(num_replicas)
        self._router = Router(policy, IndexConfig(), Fingerprints(key=1))
        self._names = [f"http://{i}" for i in range(num_replicas)]
        for name in self._names:
            self._router.add(Replica(name, name, Health.READY))
        self._listens = listens
        self._working: dict[int, tuple[Work, ExitStack]] = {}
        self._first = policy.first_tokens // BLOCK_TOKENS

    def sent(self, asked: Asked) -> int:
        """The replica that the router chooses."""
        fingerprints = self._router.index.fingerprints
        tokens = np.array(asked.blocks, dtype=np.uint32)
        prefixes = fingerprints.chain(fingerprints.root(None, None), tokens, 1)
        key = prefixes[min(len(prefixes), self._first) - 1].to_bytes(8, "big")
        prompt = RoutedPrompt(asked.num_tokens, [Prefixes(prefixes, BLOCK_TOKENS)], key, None)
        routed = self._router.choose(prompt)
        assert routed is not None
        if self._listens:
            self._router.sent(prompt, routed.choice.name)
        replica = self._router.replicas[routed.choice.name]
        end = ExitStack()
        work = end.enter_context(replica.working(max(0, asked.num_tokens - routed.matched.total)))
        self._working[id(asked)] = work, end
        return self._names.index(routed.choice.name)

    def began(self, asked: Asked) -> None:
        """Its prompt waits no longer."""
        work, _ = self._working[id(asked)]
        work.begin()

    def ended(self, asked: Asked) -> None:
        """It is no load any longer."""
        _, end = self._working.pop(id(asked))
        end.close()

    def told(self, replica: int, event: Event) -> None:
        """The index learns."""
        if self._listens:
            self._router.learn(self._names[replica], EventBatch(0.0, [event]))


def play(prompts: Sequence[Asked], way: Way, num_replicas: int, num_blocks: int, tokens_per_s: float) -> Played:
    """Answer the prompts when they come."""
    happening: list[tuple[float, int, Callable[[float], None]]] = []
    numbers = iter(range(10**9))

    def at(when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(happening, (when, next(numbers), what))

    def replica(i: int) -> SimulatedReplica:
        def tell(now: float, event: Event) -> None:
            at(now + EVENTS_S, lambda _: way.told(i, event))

        return SimulatedReplica(BlockPool(num_blocks), tokens_per_s, tell)

    replicas = [replica(i) for i in range(num_replicas)]
    ttft_s: list[float] = []

    def go_on(there: SimulatedReplica, now: float) -> None:
        if not there.waiting or there.free_at > now:
            return
        asked = there.waiting.popleft()
        num_found, slots = there.begin(asked, now)
        at(there.free_at, lambda then: computed(there, asked, num_found, slots, then))

    def computed(there: SimulatedReplica, asked: Asked, num_found: int, slots: list[int], now: float) -> None:
        there.finish(asked, num_found, slots, now)
        ttft_s.append(now - asked.at)
        way.began(asked)
        at(now + asked.num_answered * SECONDS_PER_TOKEN, lambda _: ended(there, asked, slots))
        go_on(there, now)

    def ended(there: SimulatedReplica, asked: Asked, slots: list[int]) -> None:
        there.release(slots)
        way.ended(asked)

    def arrive(asked: Asked) -> Callable[[float], None]:
        def come(now: float) -> None:
            there = replicas[way.sent(asked)]
            there.waiting.append(asked)
            go_on(there, now)

        return come

    for asked in prompts:
        at(asked.at, arrive(asked))
    while happening:
        now, _, what = heapq.heappop(happening)
        what(now)
    return Played(sum(each.num_hit for each in replicas), [each.num_computed for each in replicas], ttft_s)


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--trace", type=Path, help="a file of prompts in Mooncake's format")
    parser.add_argument("--blocks", type=int, nargs="+", help="of 512 tokens, per replica")
    parser.add_argument("--requests", type=int, help="only so many of the trace (default: all)")
    parser.add_argument("--indexed", type=int, help="blocks in the index while choosing is timed (a million)")
    options = parser.parse_args()
    num_chats = options.effort.of(6000, quick=300)
    workloads = {"chats": _made_up(num_chats)}
    if options.trace is not None:
        lines = [_asked(json.loads(line)) for line in options.trace.open()]
        workloads[options.trace.stem.partition("_")[0]] = lines[: options.requests]
    rows = []
    for workload, prompts in workloads.items():
        for num_blocks in options.blocks or options.effort.of((2500, 5000, 10_000), quick=(125, 250, 500)):
            rows += trace_rows(workload, prompts, num_blocks)
    num_indexed = options.indexed or options.effort.of(1_000_000, quick=10_000)
    prompt_blocks = options.effort.of(PROMPT_BLOCKS, QUICK_PROMPT_BLOCKS)
    publish("routing", [*rows, *choosing_rows(num_indexed, prompt_blocks)], options.json)


def trace_rows(workload: str, prompts: Sequence[Asked], num_blocks: int) -> list[Row]:
    """Hits by way of spreading, for replicas with so many blocks each."""
    policy = PolicyConfig()

    def spread(way: Way) -> Played:
        return play(prompts, way, NUM_REPLICAS, num_blocks, TOKENS_PER_S)

    big = play(prompts, Way(1), 1, NUM_REPLICAS * num_blocks, NUM_REPLICAS * TOKENS_PER_S)
    routed, turns = spread(Routed(NUM_REPLICAS, policy)), spread(Way(NUM_REPLICAS))
    hashed = spread(Routed(NUM_REPLICAS, policy, listens=False))
    num_tokens = sum(each.num_tokens for each in prompts)
    title = f"{workload}, {num_blocks:,} each:"
    of_big, of_turns = routed.num_hit / big.num_hit, routed.num_hit / turns.num_hit
    return [
        Row(f"{title} one big cache's hits", 100 * big.num_hit / num_tokens, "%"),
        Row(f"{title} routed / one big cache", of_big, "", f">= {MIN_OF_BIG}", of_big >= MIN_OF_BIG, varies=True),
        Row(
            f"{title} routed / round-robin",
            of_turns,
            "",
            f">= {MIN_OF_ROUND_ROBIN}",
            of_turns >= MIN_OF_ROUND_ROBIN,
            varies=True,
        ),
        Row(f"{title} hashing alone / one big cache", hashed.num_hit / big.num_hit, ""),
        Row(f"{title} computed by the busiest / mean, routed", routed.balance, ""),
        Row(f"{title} computed by the busiest / mean, hashing", hashed.balance, ""),
        Row(f"{title} median TTFT, routed", median(routed.ttft_s), "s"),
        Row(f"{title} median TTFT, round-robin", median(turns.ttft_s), "s"),
        Row(f"{title} p99 TTFT, routed", _p99(routed.ttft_s), "s"),
        Row(f"{title} p99 TTFT, round-robin", _p99(turns.ttft_s), "s"),
    ]


def choosing_rows(num_indexed: int, prompt_blocks: Sequence[int]) -> list[Row]:
    """What choosing takes with a full index: from a prompt's tokens to the replica."""
    router = Router(PolicyConfig(), IndexConfig(), Fingerprints(key=1))
    replicas = [f"http://{i}" for i in range(NUM_REPLICAS)]
    for name in replicas:
        router.add(Replica(name, name, Health.READY))
    rng = random.Random(1)
    documents = list(_documents(num_indexed, prompt_blocks, rng))
    numbers = iter(range(1, 10**9))
    began_at = time.perf_counter()
    for i, document in enumerate(documents):
        names = [next(numbers) for _ in range(len(document) // 16)]
        router.learn(replicas[i % NUM_REPLICAS], EventBatch(0.0, [BlockStored(names, None, document.tolist(), 16)]))
    learning = time.perf_counter() - began_at
    rows = [Row("indexing, for 1,000 blocks", 1e6 * learning / num_indexed, "ms")]
    all_ms = []
    for num_blocks in prompt_blocks:
        taken_ms = []
        for document in rng.choices([each for each in documents if len(each) >= num_blocks * 16], k=100):
            tokens = document[: num_blocks * 16].copy()
            tokens[-16 * rng.randrange(1, num_blocks) :] = rng.randrange(1 << 16)  # where the question begins
            taken_ms.append(_choosing_ms(router, tokens))
        all_ms += taken_ms
        rows.append(Row(f"choosing, a prompt of {num_blocks:,} blocks of 16: p99", _p99(taken_ms), "ms"))
    worst = _p99(all_ms)
    rows.append(Row("choosing, all these: median", median(all_ms), "ms"))
    rows.append(at_most(f"choosing, all these: p99 at {num_indexed:,} blocks", worst, "ms", MAX_CHOOSING_MS))
    return rows


def _choosing_ms(router: Router, tokens: "np.ndarray[tuple[int], np.dtype[np.uint32]]") -> float:
    question = Question(b"", token_ids=())
    began_at = time.perf_counter()
    prompt = router.prompt(question, tokens, None, "")
    assert router.choose(prompt) is not None
    return 1000 * (time.perf_counter() - began_at)


def _documents(
    num_blocks: int, lengths: Sequence[int], rng: random.Random
) -> "Iterator[np.ndarray[tuple[int], np.dtype[np.uint32]]]":
    """Prompts of so many blocks of 16 tokens in all, of lengths from short to the longest."""
    draw = np.random.default_rng(1)
    left = num_blocks
    while left:
        size = min(left, rng.choice(lengths))
        yield draw.integers(0, 150_000, 16 * size, dtype=np.uint32)
        left -= size


def _asked(line: dict[str, int | list[int]]) -> Asked:
    at, length, answered, blocks = (line[name] for name in ("timestamp", "input_length", "output_length", "hash_ids"))
    assert isinstance(at, int | float)
    assert isinstance(length, int)
    assert isinstance(answered, int)
    assert isinstance(blocks, list)
    return Asked(at / 1000, length, answered, blocks[: length // BLOCK_TOKENS])  # the last is not full


def _made_up(num_chats: int) -> list[Asked]:
    numbers: dict[BlockName, int] = {}
    asked = []
    for i, names in enumerate(chats(num_chats, seed=1)):
        blocks = [numbers.setdefault(name, len(numbers)) for name in names]
        asked.append(Asked(i * 0.35, len(blocks) * BLOCK_TOKENS + 100, 200, blocks))
    return asked


def _name(block: int) -> BlockName:
    return BlockName(bytes(24) + _hash(block).to_bytes(8, "big"))


def _hash(block: int) -> int:
    return block * 0x9E3779B97F4A7C15 % (1 << 64)


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))


if __name__ == "__main__":
    main()
