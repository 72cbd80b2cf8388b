"""PrefixIndex: which replica has which prefixes, and in which tier."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from math import floor

import numpy as np

from kvtier.routing.fingerprints import Fingerprint, Fingerprints, Prefixes
from kvtier.routing.kv_event import AllBlocksCleared, BlockRemoved, BlockStored, Event, Name
from kvtier.tiers.naming.tier import Tier

MAX_SIZES = 3  # of blocks: an engine's own, and those of one or two caches below it
_MAX_SIZES = 64  # that are counted, whatever a replica tells
_MAX_LORAS = 4096  # names that are kept, likewise
SWEPT = 1000  # prefixes that are looked at with each event, if a replica was forgotten: 0.2 ms
MAX_LOOKED_UP = 512  # blocks of one prompt: of a longer one each second is looked up, each third, …


class Standing(IntEnum):
    """Why a replica should have a block, the best first. The value is a bit of the replica's four."""

    DEVICE = 1
    HOST = 2
    DISK = 4
    EXPECTED = 8  # it was sent a prompt with it, and no event has told of it yet


_BITS = len(Standing)
_ALL = (1 << _BITS) - 1
_OF_TIER = {Tier.DEVICE: Standing.DEVICE, Tier.HOST: Standing.HOST, Tier.DISK: Standing.DISK}
# The best standing for each value of a replica's four bits.
_BEST = [None, *(next(each for each in Standing if bits & each) for bits in range(1, _ALL + 1))]


@dataclass(frozen=True, slots=True)
class Matched:
    """How many tokens of a prompt's beginning a replica has, by the best place for each."""

    device: int = 0
    host: int = 0
    disk: int = 0
    expected: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.device + self.host + self.disk + self.expected


NOTHING = Matched()


@dataclass(slots=True)
class _Run:
    """Blocks *start* to *end* of a prompt, of which *held* says who has them. *first* is the first that was looked up:
    those before it may be held by others too."""

    held: int
    start: int
    first: int
    end: int


class PrefixIndex:
    """What events say that replicas have, and what they were sent, by the fingerprints of prefixes.

    *holders* has for each known prefix four bits of each replica. A replica's name of a block leads to its fingerprint
    as long as there is room; what is forgotten for room, the oldest first, is forgotten of all replicas, so that none
    is believed to have what it has long lost. Owned by one thread.

    It is approximate: between two blocks that a replica has, up to one in 512 of a long prompt apart, all count as had.
    """

    def __init__(self, fingerprints: Fingerprints, max_blocks: int) -> None:
        """*max_blocks*: names to know, and as many prefixes that were sent and not told of."""
        self.fingerprints = fingerprints
        self.loras: OrderedDict[str, None] = OrderedDict()  # those told of last
        self.num_orphans = 0  # blocks that cannot be placed: the parent was told before the router listened
        self._max_blocks = max_blocks
        self._sizes: Counter[int] = Counter()  # of blocks told of, by their sizes
        self._shifts: dict[str, int] = {}  # where a replica's four bits are
        self._told_of: set[str] = set()  # replicas that something is known of
        self._retired = 0  # the bits of replicas from before they were forgotten …
        self._unswept: list[Fingerprint] = []  # … which these prefixes may have
        self._holders: dict[Fingerprint, int] = {}
        self._names: OrderedDict[Name, Fingerprint] = OrderedDict()
        self._expected: OrderedDict[Fingerprint, None] = OrderedDict()

    @property
    def block_sizes(self) -> list[int]:
        """The most frequent sizes of blocks that are told of: the last chunk of a prompt in LMCache may have any."""
        return [size for size, _ in self._sizes.most_common(MAX_SIZES)]

    @property
    def num_prefixes(self) -> int:
        """How many prefixes some replica has, or should have; and had, where that is not swept away yet."""
        return len(self._holders)

    def add(self, replica: str) -> None:
        """Begin to know a replica."""
        self._shifts[replica] = self._free_shift()

    def remove(self, replica: str) -> None:
        """The replica has gone: it has nothing, and is known no longer."""
        self.forget(replica)
        del self._shifts[replica]

    def forget(self, replica: str) -> None:
        """The replica has nothing any more, as far as is known. What its blocks are called is still known.

        It has other bits from now on; those that it had are swept away, some with each event that comes (a new dict of
        a million prefixes takes half a second, in which nobody could choose).
        """
        if replica in self._told_of:
            self._told_of.discard(replica)
            self._retired |= _ALL << self._shifts[replica]
            self._shifts[replica] = self._free_shift()
            self._unswept = list(self._holders)

    def learn(self, replica: str, event: Event) -> None:
        """Take in what a replica tells."""
        match event:
            case AllBlocksCleared():
                self.forget(replica)
            case BlockStored() if not event.group_idx:
                self._told_of.add(replica)
                self._store(self._shifts[replica], event)
            case BlockRemoved() if not event.group_idx:
                self._remove(self._shifts[replica], event)
        self._sweep()

    def expect(self, replica: str, prefixes: Prefixes) -> None:
        """The replica was sent a prompt with these prefixes. Those that it has by its own word stay as they are."""
        self._told_of.add(replica)
        self._sweep()
        shift = self._shifts[replica]
        for prefix in prefixes.fingerprints:
            held = self._holders.get(prefix, 0)
            if not held >> shift & _ALL:
                self._holders[prefix] = held | Standing.EXPECTED << shift
            if held >> shift & _ALL in (0, Standing.EXPECTED):
                self._expected[prefix] = None
                self._expected.move_to_end(prefix)
        while len(self._expected) > self._max_blocks:
            oldest, _ = self._expected.popitem(last=False)
            self._drop(oldest, self._every(Standing.EXPECTED))

    def expect_no_longer(self, replica: str, prefixes: Prefixes) -> None:
        """The replica will not compute the prompt that it was sent."""
        bit = Standing.EXPECTED << self._shifts[replica]
        for prefix in prefixes.fingerprints:
            self._drop(prefix, bit)

    def matched(self, prefixes: Prefixes) -> Mapping[str, Matched]:
        """How much of a prompt each replica has, of those that have something."""
        runs = self._runs(prefixes.fingerprints)
        found = {name: self._counted(prefixes, runs, shift) for name, shift in self._shifts.items()}
        return {name: matched for name, matched in found.items() if matched.total}

    def _runs(self, prefixes: Sequence[Fingerprint]) -> list["_Run"]:
        """Who holds what of the prompt, up to the first block that nobody holds."""
        stride = 1 + len(prefixes) // MAX_LOOKED_UP
        lasts = [*range(stride - 1, len(prefixes), stride)]
        if prefixes and (not lasts or lasts[-1] < len(prefixes) - 1):
            lasts.append(len(prefixes) - 1)
        runs: list[_Run] = []
        get, before = self._holders.get, 0
        for last in lasts:
            held = get(prefixes[last], 0)
            if runs and held == runs[-1].held:
                runs[-1].end = last + 1
            else:
                runs.append(_Run(held, before, last, last + 1))
            if not held:
                break
            before = last + 1
        return runs

    def _counted(self, prefixes: Prefixes, runs: Sequence["_Run"], shift: int) -> Matched:
        """How much one replica has of what the *runs* say."""
        counts = dict.fromkeys(Standing, 0)
        for run in runs:
            standing = _BEST[run.held >> shift & _ALL]
            if standing is None:  # somewhere up to the run's first block that was looked up
                for prefix in prefixes.fingerprints[run.start : run.first]:
                    standing = _BEST[self._holders.get(prefix, 0) >> shift & _ALL]
                    if standing is None:
                        break
                    counts[standing] += 1
                break
            counts[standing] += run.end - run.start
        return Matched(*(floor(blocks * prefixes.step_tokens) for blocks in counts.values()))

    def _store(self, shift: int, event: BlockStored) -> None:
        if event.token_ids:
            self._name(event)
        bit, expected = _OF_TIER[event.tier] << shift, Standing.EXPECTED << shift
        for name in event.block_hashes:
            prefix = self._names.get(name)
            if prefix is None:
                self.num_orphans += 1
            else:
                self._holders[prefix] = self._holders.get(prefix, 0) & ~expected | bit

    def _remove(self, shift: int, event: BlockRemoved) -> None:
        gone = _OF_TIER[event.tier] << shift
        for name in event.block_hashes:
            prefix = self._names.get(name)
            if prefix is not None:
                self._drop(prefix, gone)

    def _drop(self, prefix: Fingerprint, bits: int) -> None:
        left = self._holders.get(prefix, 0) & ~bits
        if left:
            self._holders[prefix] = left
        else:
            self._holders.pop(prefix, None)

    def _free_shift(self) -> int:
        """Four bits that no replica has, and none had whose bits are not swept away."""
        taken = self._retired | sum(_ALL << shift for shift in self._shifts.values())
        return next(shift for shift in count(0, _BITS) if not taken >> shift & _ALL)

    def _sweep(self) -> None:
        """Clear the bits that replicas had before they were forgotten, of some prefixes."""
        for prefix in self._unswept[-SWEPT:]:
            self._drop(prefix, self._retired)
        del self._unswept[-SWEPT:]
        if not self._unswept:
            self._retired = 0

    def _every(self, standing: Standing) -> int:
        """The mask with the bit of that standing for each replica."""
        return sum(standing << shift for shift in self._shifts.values())

    def _name(self, event: BlockStored) -> None:
        """Find out which prefixes the blocks of an event are, which has their tokens."""
        size, keys = event.block_size, event.extra_keys or []
        before = self._before(event)
        if before is None or len(event.token_ids) != size * len(event.block_hashes):
            return
        self._sizes[size] += len(event.block_hashes)
        if len(self._sizes) > _MAX_SIZES:
            self._sizes = Counter(dict(self._sizes.most_common(_MAX_SIZES // 2)))
        if event.lora_name is not None:
            self.loras[event.lora_name] = None
            self.loras.move_to_end(event.lora_name)
            if len(self.loras) > _MAX_LORAS:
                self.loras.popitem(last=False)
        tokens = np.array(event.token_ids, dtype=np.uint64)
        if not any(_others(each, event.lora_name) for each in keys):
            self._know(event.block_hashes, self.fingerprints.chain(before, tokens, size))
            return
        for i, name in enumerate(event.block_hashes):
            (before,) = self.fingerprints.chain(before, tokens[i * size : (i + 1) * size], size)
            others = _others(keys[i] if i < len(keys) else None, event.lora_name)
            before = self.fingerprints.beside(before, others) if others else before
            self._know([name], [before])

    def _before(self, event: BlockStored) -> Fingerprint | None:
        """The prefix that an event's first block follows; None if it is not known."""
        if event.parent_block_hash is not None:
            return self._names.get(event.parent_block_hash)
        return self.fingerprints.root(event.lora_name, _salt((event.extra_keys or [None])[0], event.lora_name))

    def _know(self, names: Sequence[Name], prefixes: Sequence[Fingerprint]) -> None:
        for name, prefix in zip(names, prefixes, strict=True):
            self._names[name] = prefix
            self._names.move_to_end(name)
        while len(self._names) > self._max_blocks:
            _, forgotten = self._names.popitem(last=False)
            self._holders.pop(forgotten, None)


def _salt(keys: Sequence[object] | None, lora: str | None) -> str | None:
    """The salt among the keys of a prompt's first block, which come without tags: a text that is not the adapter's
    name, which is the first."""
    texts = [key for key in keys or () if isinstance(key, str)]
    return next(iter(texts[1:] if lora is not None and texts[:1] == [lora] else texts), None)


def _others(keys: Sequence[object] | None, lora: str | None) -> list[object]:
    """What else the KV of a block depends on: images, embeddings. Adapter and salt are in the root."""
    return [key for key in keys or () if not isinstance(key, str)]
