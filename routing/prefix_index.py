"""`PrefixIndex`: which prefixes each replica has cached, and in which tiers."""

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

MAX_SIZES = 3  # block sizes that prompts are looked up with: an engine's own, and those of one or two caches below it
_MAX_SIZES = 64  # block sizes that are counted, in case replicas report many
_MAX_LORAS = 4096  # adapter names that are kept, in case replicas report many
SWEPT = 1000  # prefixes from which one event clears the bits of forgotten replicas, which takes 0.2 ms
MAX_LOOKED_UP = 512  # blocks of a prompt to look up: in a longer prompt, only every second or third block and so on


class Standing(IntEnum):
    """The tier in which a replica has a block, best tier first, or EXPECTED if the block is not reported yet.

    The values are bits: for each prefix, the index has these four bits per replica.
    """

    DEVICE = 1
    HOST = 2
    DISK = 4
    EXPECTED = 8  # the replica was sent a prompt with the block, and no event has reported the block yet


_BITS = len(Standing)
_ALL = (1 << _BITS) - 1
_OF_TIER = {Tier.DEVICE: Standing.DEVICE, Tier.HOST: Standing.HOST, Tier.DISK: Standing.DISK}
# The best standing for each value of a replica's four bits.
_BEST = [None, *(next(each for each in Standing if bits & each) for bits in range(1, _ALL + 1))]


@dataclass(frozen=True, slots=True)
class Matched:
    """The number of leading tokens of a prompt that a replica has cached, by tier.

    Tokens that the replica has in several tiers count for the best of these tiers. *expected* tokens were sent to the
    replica in an earlier prompt, but no KV event has reported them yet.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    expected: int = 0

    @property
    def total(self) -> int:
        """Number of tokens in all tiers, plus tokens sent to the replica that no KV event has reported yet."""
        return self.device + self.host + self.disk + self.expected


NOTHING = Matched()


@dataclass(slots=True)
class _Run:
    """Consecutive blocks of a prompt, *start* to *end* - 1, that the same replicas have in the same tiers.

    Of a long prompt, only every n-th block is looked up. *first* is the first such block of the run. A replica without
    this block may still have some of the run's earlier blocks, which were skipped.
    """

    held: int  # where each replica has the looked-up blocks: four bits per replica, see `Standing`
    start: int
    first: int  # the first block of the run that was looked up
    end: int


class PrefixIndex:
    """An index of the prefixes that each replica has, according to its KV events and the prompts sent to it.

    A prefix is identified by its fingerprint, which the router computes. For each known prefix, the index has four bits
    per replica, see `Standing`. A second table maps the block hashes in KV events to fingerprints. If this table is
    full, its oldest hash is dropped. A later event that removes this block could then not be applied, so the index
    forgets the block's prefix at once. Owned by one thread.

    The index is approximate for long prompts: only about 512 blocks at equal distances are looked up. If a replica has
    one of these blocks, the index assumes that the replica also has the skipped blocks before it.
    """

    def __init__(self, fingerprints: Fingerprints, max_blocks: int) -> None:
        """Create an empty index.

        *max_blocks* is the maximum number of block hashes. A second limit of the same size applies to prefixes that
        were sent to a replica and are not reported yet.
        """
        self.fingerprints = fingerprints
        self.loras: OrderedDict[str, None] = OrderedDict()  # adapters in the latest events
        self.num_orphans = 0  # reported blocks of unknown prefixes, whose first blocks the router has not seen
        self._max_blocks = max_blocks
        self._sizes: Counter[int] = Counter()  # number of reported blocks by size
        self._shifts: dict[str, int] = {}  # position of a replica's four bits
        self._told_of: set[str] = set()  # replicas with at least one known prefix
        self._retired = 0  # the bits that replicas had before they were forgotten, until no prefix has them
        self._unswept: list[Fingerprint] = []  # prefixes that may still have retired bits
        self._holders: dict[Fingerprint, int] = {}
        self._names: OrderedDict[Name, Fingerprint] = OrderedDict()
        self._expected: OrderedDict[Fingerprint, None] = OrderedDict()

    @property
    def block_sizes(self) -> list[int]:
        """The block sizes that replicas report most often, at most `MAX_SIZES` of them.

        Rare sizes are left out, because LMCache's last chunk of a prompt may have any size.
        """
        return [size for size, _ in self._sizes.most_common(MAX_SIZES)]

    @property
    def num_prefixes(self) -> int:
        """Number of prefixes in the index. Prefixes of a forgotten replica count until they are cleared."""
        return len(self._holders)

    def add(self, replica: str) -> None:
        """Add a replica."""
        self._shifts[replica] = self._free_shift()

    def remove(self, replica: str) -> None:
        """Remove a replica, and forget its prefixes."""
        self.forget(replica)
        del self._shifts[replica]

    def forget(self, replica: str) -> None:
        """Forget which prefixes a replica has. The block hashes in its later events are still recognized.

        Each prefix has four bits for each replica, which say where the replica has the prefix. Clearing a replica's
        bits in a million prefixes would take half a second, in which no request could be routed. Instead, the replica
        is assigned four unused bits. Later events clear the old bits, in a few prefixes each.
        """
        if replica in self._told_of:
            self._told_of.discard(replica)
            self._retired |= _ALL << self._shifts[replica]
            self._shifts[replica] = self._free_shift()
            self._unswept = list(self._holders)

    def learn(self, replica: str, event: Event) -> None:
        """Apply a KV event of a replica."""
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
        """Record that the replica was sent a prompt with these *prefixes*, so that it should have them soon.

        This changes nothing for the prefixes that the replica has already reported.
        """
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
        """Undo `expect`, because the replica will not compute the prompt with these *prefixes*."""
        bit = Standing.EXPECTED << self._shifts[replica]
        for prefix in prefixes.fingerprints:
            self._drop(prefix, bit)

    def matched(self, prefixes: Prefixes) -> Mapping[str, Matched]:
        """Return how many tokens of a prompt each replica has. Replicas that have none are left out."""
        runs = self._runs(prefixes.fingerprints)
        found = {name: self._counted(prefixes, runs, shift) for name, shift in self._shifts.items()}
        return {name: matched for name, matched in found.items() if matched.total}

    def _runs(self, prefixes: Sequence[Fingerprint]) -> list["_Run"]:
        """Divide a prompt's blocks into runs that the same replicas have in the same tiers.

        Of a long prompt, only every n-th block is looked up. The last run ends with the first looked-up block that no
        replica has.
        """
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
        """Return how many leading tokens of a prompt one replica has, by tier.

        *shift* is the position of the replica's four bits, see `Standing`.
        """
        counts = dict.fromkeys(Standing, 0)
        for run in runs:
            standing = _BEST[run.held >> shift & _ALL]
            if standing is None:  # the part of the prompt that the replica has ends before the block *first*
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
        """Return the position of four unused bits (see `Standing`): no replica has them, and no prefix has them set."""
        taken = self._retired | sum(_ALL << shift for shift in self._shifts.values())
        return next(shift for shift in count(0, _BITS) if not taken >> shift & _ALL)

    def _sweep(self) -> None:
        """Clear the old bits of forgotten replicas (see `forget`) in up to `SWEPT` more prefixes."""
        for prefix in self._unswept[-SWEPT:]:
            self._drop(prefix, self._retired)
        del self._unswept[-SWEPT:]
        if not self._unswept:
            self._retired = 0

    def _every(self, standing: Standing) -> int:
        return sum(standing << shift for shift in self._shifts.values())

    def _name(self, event: BlockStored) -> None:
        """Compute the fingerprint of the prefix that ends with each block of the event, and keep it by block hash."""
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
        """Return the fingerprint of the prefix before the event's first block, or None if it is unknown."""
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
    """Return the salt among the extra keys of a prompt's first block, or None.

    The list *keys* does not say what each key is. Its strings are the adapter's name, if any, and then the salt.
    """
    texts = [key for key in keys or () if isinstance(key, str)]
    return next(iter(texts[1:] if lora is not None and texts[:1] == [lora] else texts), None)


def _others(keys: Sequence[object] | None, lora: str | None) -> list[object]:
    """Return the extra keys that are not strings, such as images.

    The strings are the adapter and the salt, which are part of the root fingerprint.
    """
    return [key for key in keys or () if not isinstance(key, str)]
