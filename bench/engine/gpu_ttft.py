"""How soon does the first token come from each tier, by document length? Are loaded bytes those that were computed?"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

import torch
import xxhash
from transformers import PreTrainedModel

from bench.engine.gpu_shapes import Documents, Prompts, Shape, free_memory, tokenizer_of_one_word
from bench.gpu_progress import Clock, failure
from bench.report import Row
from bench.rounds import at_least, at_most
from kvtier import LLM, SamplingParams
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.local_tiers import LocalTiers
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, HashAlgorithm
from kvtier.tiers.naming.tier import EvictionCause, Tier

COLD = "cold"
TIERS = (COLD, Tier.DEVICE.value, Tier.HOST.value, Tier.DISK.value)
# Ways to load a hit: all of it before the question is computed, or, from host memory, layer by layer meanwhile.
WHOLE, LAYER_WISE = "whole", "layer-wise"
MIN_FASTER = 12.0  # promised: cold TTFT / TTFT of a host hit
MAX_COPY = 1.15  # promised: time of a host hit besides computing the question / time of a plain copy
REPETITIONS = {COLD: 5, Tier.DEVICE.value: 5, Tier.HOST.value: 5, Tier.DISK.value: 3}
FEWER = {COLD: {16: 3, 32: 2, 64: 1}, Tier.HOST.value: {64: 3}, Tier.DISK.value: {32: 2, 64: 2}}  # by 1024 tokens
SAFETY = 1.3  # the next length takes longer than its tokens say: attention is quadratic
PINNED_S = 60.0  # longest wait for host memory to be pinned
SETTLED_S = 120.0
COPY_ROUNDS = 5
READ_BYTES = 256 << 20
DIGEST_THREADS = 4
ONE_TOKEN = SamplingParams(max_tokens=1)


@dataclass(frozen=True)
class Ttft:
    """Times to the first token of a question to a document of *num_tokens*, whose blocks were in *tier*."""

    tier: str
    num_tokens: int
    seconds: tuple[float, ...]
    loading: str = WHOLE

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def label(self) -> str:
        """The name of its rows."""
        name = f"{self.tier} TTFT, {in_k(self.num_tokens)}"
        return name if self.loading == WHOLE else f"{name}, {self.loading}"


@dataclass(frozen=True)
class Roof:
    """Bytes of the blocks of the promised length, and seconds to copy as many from pinned memory at once."""

    num_bytes: int
    seconds: float


@dataclass
class Ledger:
    """Digests of blocks when they were computed, and the number of promoted blocks that differ from them."""

    known: dict[BlockName, bytes] = field(default_factory=dict)
    num_compared: int = 0
    num_different: int = 0

    def on_computed(self, names: Sequence[BlockName], digests: Sequence[bytes]) -> None:
        """Keep the digests of blocks that were computed."""
        self.known.update(zip(names, digests, strict=True))

    def on_promoted(self, names: Sequence[BlockName], digests: Sequence[bytes]) -> None:
        """Compare the digests of blocks that were promoted to the device."""
        self.num_compared += len(names)
        self.num_different += sum(self.known[name] != digest for name, digest in zip(names, digests, strict=True))


class Tiers:
    """Moves blocks between the tiers of an idle engine, and reads those on the device.

    Only this class uses private parts of the cache. The model has one group of layers.
    """

    def __init__(self, llm: LLM, read_bytes: int = READ_BYTES) -> None:
        self._cache = llm.core.cache
        self._residency = llm.core.cache.residency
        assert isinstance(llm.core.cache.lower, LocalTiers), "an engine without host memory"
        self._host = llm.core.cache.lower.index.host
        (slab,) = llm.core.runner.slabs
        self._blocks = slab.blocks  # [num_slots, block_bytes]
        block_bytes = self._blocks.shape[1]
        num_read = max(1, read_bytes // block_bytes)
        self._read = torch.empty(num_read, block_bytes, dtype=torch.uint8, pin_memory=self._blocks.is_cuda)

    def settle(self) -> None:
        """Copy everything down to disk, and wait until nothing is under way."""
        give_up_at = time.monotonic() + SETTLED_S
        num_left = self._cache.drain.flush(SETTLED_S)
        while self._cache.num_in_flight and time.monotonic() < give_up_at:
            self._cache.wait(0.05)
        if num_left or self._cache.num_in_flight:
            raise RuntimeError(f"{num_left} blocks did not reach the disk in {SETTLED_S:g} s")

    def load(self, loading: str) -> None:
        """Load this way from now on, by changing `scheduler.by_layers` of a running engine: two would not fit."""
        self._cache._promoter._by_layers = loading == LAYER_WISE  # noqa: SLF001  no caller of the cache changes it

    def evict_from_device(self, names: Sequence[BlockName]) -> None:
        """Evict the blocks *names* from the device."""
        device = self._residency.groups[0].slots
        slots = device.pool.find_all(names)
        device.evict(slots[slots != ABSENT], EvictionCause.ROOM)

    def evict_from_device_and_host(self, names: Sequence[BlockName]) -> None:
        """Evict the blocks *names* from the device and from host memory."""
        self.evict_from_device(names)
        host = self._host[0]
        slots = host.pool.find_all(names)
        host.evict(slots[slots != ABSENT], EvictionCause.ROOM)

    def digests(self, names: Sequence[BlockName]) -> list[bytes]:
        """xxh3_128 of each block's bytes on the device. RuntimeError if one is not there."""
        slots = self._residency.groups[0].pool.find_all(names)
        if (slots == ABSENT).any():
            raise RuntimeError(f"{int((slots == ABSENT).sum())} of {len(names)} blocks are not on the device")
        result: list[bytes] = []
        with ThreadPoolExecutor(DIGEST_THREADS) as threads:
            for part in torch.from_numpy(slots).long().split(len(self._read)):
                read = self._read[: len(part)]
                read.copy_(self._blocks[part.to(self._blocks.device)])
                result += threads.map(xxhash.xxh3_128_digest, read.numpy())
        return result


class Reader:
    """Asks questions about documents on one engine, and checks that the tokens come from the intended tier."""

    def __init__(self, llm: LLM, prompts: Prompts, documents: Documents, ledger: Ledger | None) -> None:
        self.tiers = Tiers(llm)
        self._llm = llm
        self._prompts = prompts
        self._documents = documents
        self._ledger = ledger
        self._names = llm.config.names

    def times(self, num_tokens: int, clock: Clock) -> list[Ttft]:
        """TTFTs of all tiers for one document length. Afterwards its blocks are evicted but from the disk."""
        seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        for num_more in reversed(range(repetitions(COLD, num_tokens))):
            document = self._prompts.new(num_tokens)
            names = self._names_of(document)
            seconds[COLD, WHOLE].append(self._ask(document, COLD))
            if num_more:
                self.tiers.evict_from_device_and_host(names)
        if self._ledger is not None:
            self._ledger.on_computed(names, self.tiers.digests(names))
        self.tiers.settle()
        ways = [
            (Tier.DEVICE.value, WHOLE, lambda names: None),
            *((Tier.HOST.value, loading, self.tiers.evict_from_device) for loading in (WHOLE, LAYER_WISE)),
            (Tier.DISK.value, WHOLE, self.tiers.evict_from_device_and_host),
        ]
        for tier, loading, evict in ways:
            self.tiers.load(loading)
            for repetition in range(repetitions(tier, num_tokens)):
                if repetition and clock.left < 0:
                    break
                evict(names)
                seconds[tier, loading].append(self._ask(document, tier))
                if self._ledger is not None and tier != Tier.DEVICE:
                    self._ledger.on_promoted(names, self.tiers.digests(names))
                self.tiers.settle()
        self.tiers.evict_from_device_and_host(names)
        found = [Ttft(tier, num_tokens, tuple(times), loading) for (tier, loading), times in seconds.items()]
        clock.note(", ".join(f"{ttft.label} {ttft.median_s:.4g} s" for ttft in found))
        return found

    def _ask(self, document: list[int], tier: str) -> float:
        """TTFT of a new question about *document*. RuntimeError unless all of that came from *tier*."""
        question = self._prompts.new(self._documents.question)
        done = self._llm.generate([document + question], ONE_TOKEN, progress=False)[0]
        expected = dict.fromkeys(TIERS, 0)
        expected[tier] += len(document)
        expected[COLD] += len(question)
        tokens = done.tokens
        found = dict(zip(TIERS, (tokens.recomputed, tokens.device, tokens.host, tokens.disk), strict=True))
        if found != expected:
            raise RuntimeError(f"a {tier} hit's tokens came from {found} ({dict(tokens.reasons)}), not {expected}")
        return done.ttft_s

    def _names_of(self, document: list[int]) -> list[BlockName]:
        chain = BlockChain(
            self._llm.config.device.block_size,
            algorithm=HashAlgorithm(self._names.algorithm),
            seed=self._names.seed,
        )
        chain.extend(document)
        return chain.names


def ttft_by_tier(model: PreTrainedModel, shape: Shape, clock: Clock, with_digests: bool) -> list[Row]:
    """Part (b), and (e) if *with_digests*: TTFT of every length from every tier, as far as time allows."""
    documents, ledger = shape.documents, Ledger() if with_digests else None
    prompts, found, roof = Prompts(shape.model["vocab_size"]), list[Ttft](), None
    scheduler = {"load": "always", "token_budget": documents.chunk, "prefill_chunk": documents.chunk}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        config = {**shape.tiers(documents.pools, folder), "scheduler": scheduler}
        with closing(LLM(model, config, tokenizer_of_one_word())) as llm:
            rows += wait_pinned(llm, clock)
            clock.note("warming up")
            reader = Reader(llm, prompts, documents, None)
            reader.times(documents.lengths[0], clock)
            reader = Reader(llm, prompts, documents, ledger)
            token_s = 0.0  # a token, at the last length measured
            for num_tokens in documents.lengths:
                expected_s = SAFETY * token_s * num_tokens
                if clock.left < expected_s:
                    rows.append(left_out(num_tokens, num_tokens == documents.promised, expected_s, clock))
                    continue
                started = time.monotonic()
                try:
                    found += reader.times(num_tokens, clock)
                    if num_tokens == documents.promised:
                        roof = pinned_copy(num_tokens * shape.token_bytes, model.device)
                except RuntimeError as error:  # such as too little memory; shorter lengths are measured by now
                    rows.append(failure(in_k(num_tokens), error))
                token_s = (time.monotonic() - started) / num_tokens
            llm.reset_prefix_cache()  # else closing would write what is left to disk
    free_memory()
    rows += ttft_rows(found, roof, documents.promised, shape.token_bytes)
    return rows if ledger is None else rows + equality_rows(ledger)


def wait_pinned(llm: LLM, clock: Clock) -> list[Row]:
    """Wait up to `PINNED_S` until all memory of the host tier, if there is one, is pinned."""
    started, tiers = time.monotonic(), llm.statistics().cache.tiers
    if Tier.HOST not in tiers:
        return []
    capacity = tiers[Tier.HOST].capacity_bytes
    while (prepared := llm.statistics().host_prepared_bytes) < capacity and time.monotonic() - started < PINNED_S:
        time.sleep(0.05)
    took_s = time.monotonic() - started
    clock.note(f"{prepared >> 20} MiB of host memory are pinned after {took_s:.1f} s more")
    return [
        Row("host tier pinned", 100 * prepared / capacity, "%", "100", prepared == capacity),
        Row("  waited for it, after the start", took_s, "s"),
    ]


def pinned_copy(num_bytes: int, device: torch.device) -> Roof:
    """Time a single copy of *num_bytes* to the device: no hit could be loaded faster."""
    source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(COPY_ROUNDS + 1):
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return Roof(num_bytes, statistics.median(times[1:]))


def repetitions(tier: str, num_tokens: int) -> int:
    """How often *tier* is measured; less often for long documents."""
    fewer = [count for thousands, count in FEWER.get(tier, {}).items() if num_tokens >= thousands << 10]
    return min([REPETITIONS[tier], *fewer])


def ttft_rows(found: Sequence[Ttft], roof: Roof | None, promised: int, token_bytes: int) -> list[Row]:
    """Rows of each TTFT, of cold TTFT over it, and of the promises about a host hit."""
    rows = []
    cold_s = {ttft.num_tokens: ttft.median_s for ttft in found if ttft.tier == COLD}
    question_s = {ttft.num_tokens: ttft.median_s for ttft in found if ttft.tier == Tier.DEVICE}
    for ttft in found:
        is_promised = ttft.num_tokens == promised
        rows.append(Row(ttft.label, 1000 * ttft.median_s, "ms"))
        if is_promised and len(ttft.seconds) > 1:
            rows.append(Row("  slowest / fastest", max(ttft.seconds) / min(ttft.seconds), ""))
        if ttft.tier == COLD:
            continue
        minimum = MIN_FASTER if ttft.tier == Tier.HOST and is_promised else None
        rows.append(at_least(f"cold / {ttft.label}", cold_s[ttft.num_tokens] / ttft.median_s, minimum))
        if ttft.tier == Tier.DISK and is_promised:
            load_s = max(1e-9, ttft.median_s - question_s[promised])
            rows.append(Row(f"  {ttft.label}: loaded at", promised * token_bytes / load_s / 1e9, "GB/s"))
    if roof is None:
        return rows
    length = in_k(promised)
    rows.append(Row(f"plain pinned copy of {length}'s blocks", roof.num_bytes / roof.seconds / 1e9, "GB/s"))
    rows.append(Row(f"question after {length} of prefix", 1000 * question_s[promised], "ms"))
    for ttft in found:
        if ttft.tier == Tier.HOST and ttft.num_tokens == promised:
            ratio = (ttft.median_s - question_s[promised]) / roof.seconds
            rows.append(at_most(f"({ttft.label} - question) / plain pinned copy", ratio, "", MAX_COPY))
    return rows


def equality_rows(ledger: Ledger) -> list[Row]:
    """Rows of how many promoted blocks were compared, and how many differ from the computed ones."""
    compared, different = ledger.num_compared, ledger.num_different
    return [
        Row("promoted blocks compared", compared, "", ">= 1", compared >= 1),
        Row("promoted blocks that differ", different, "", "0", compared >= 1 and different == 0),
    ]


def left_out(num_tokens: int, is_promised: bool, expected_s: float, clock: Clock) -> Row:
    """The row of a length that there is no time for. A promise about it counts as not kept."""
    clock.note(f"{in_k(num_tokens)} left out: it would take {expected_s:.0f} s, {clock.left:.0f} s are left")
    name = f"{in_k(num_tokens)} left out, would take"
    return Row(name, expected_s, "s", "to be measured", False) if is_promised else Row(name, expected_s, "s")


def in_k(num_tokens: int) -> str:
    """A length in words: "32k"."""
    return f"{num_tokens >> 10}k" if num_tokens >= 1 << 10 else str(num_tokens)
