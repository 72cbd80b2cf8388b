"""Choice: whether a segment's attention reads blocks in place or gathers them, whichever was faster on this device.

It is measured once for each `Shape` in a process, when a model's attention runs the first time. That is when the model
is loaded (`ModelRunner` compares it to its own attention), so no request waits for it, and no request's path depends on
the requests before it: for one class of queries and keys the choice stays the same as long as the process lives, also
for a second engine. On a CPU, without Triton, and where the kernel does not compile or differs, blocks are gathered.

*Equal names, equal bytes*: the two paths round differently, so another process with another measurement may compute a
block with other last bits, as another chunk size or batch may. A name promises equal tokens under equal weights, and
that bytes once published under it never change: a request that computes a block again adopts the first copy, and tiers
only copy. Nothing compares the bytes of two computations.
"""

import bisect
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from kvtier.engine.model.fast_path import TOLERANCE, are_off
from kvtier.engine.model.paged_gather import Scoring, Scratch, attend_gathered
from kvtier.engine.model.paged_in_place import Plan, attend_in_place, plan, supports
from kvtier.engine.model.paged_segment import Segment, segment
from kvtier.tiers.naming.groups import AttentionGroup

log = logging.getLogger(__name__)

# The numbers that are measured, and the bounds of the classes they stand for (about halfway, in powers). Decodings come
# in batches.
NUM_QUERIES, QUERY_BOUNDS = (1, 64, 1024), (1, 256)
ENDS, KEY_BOUNDS = (512, 4096, 32768), (1448, 11585)
NUM_DECODING = 8
# Calls in a row, as layers follow each other, so that launching counts where it is slower.
NUM_ROUNDS, CALLS_PER_ROUND = 5, 4


@dataclass(frozen=True, slots=True)
class Shape:
    """All that the speed of a layer's attention depends on, besides the numbers of queries and keys."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    group: AttentionGroup
    has_softcap: bool
    has_sinks: bool


Class = tuple[int, int]  # of a segment: the places of its numbers of queries and of keys among the bounds


@dataclass(frozen=True, slots=True)
class Choice:
    """The classes of segments that are gathered; segments of all other classes are read in place."""

    gathered: frozenset[Class]

    def in_place(self, part: Segment) -> bool:
        """Whether the segment is read in place; the same for equal numbers of queries and keys."""
        return class_of(part) not in self.gathered


ALL_IN_PLACE = Choice(frozenset())
ALL_GATHERED = Choice(frozenset(product(range(len(NUM_QUERIES)), range(len(ENDS)))))


def class_of(part: Segment) -> Class:
    """The class of a segment."""
    return bisect.bisect_left(QUERY_BOUNDS, part.num_queries), bisect.bisect_left(KEY_BOUNDS, part.num_keys)


_choices: dict[Shape, Choice] = {}  # of this process: two engines of one shape must choose alike


def choose(shape: Shape, slab: torch.Tensor) -> Choice:
    """The choice for *shape*, measured on *slab* the first time; the slab is only read.

    Measuring blocks for about a second, and for longer the first time on a machine, when Triton compiles.
    """
    choice = _choices.get(shape)
    if choice is None:
        choice = _choices.setdefault(shape, _measured(shape, slab))
    return choice


def _measured(shape: Shape, slab: torch.Tensor) -> Choice:
    if (
        shape.device.type != "cuda"
        or are_off()
        or not supports(shape.device, shape.dtype, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.group)
    ):
        return ALL_GATHERED
    # A model that is being loaded must draw the same numbers as without this.
    state = torch.cuda.get_rng_state(shape.device)
    try:
        error = largest_error(shape)
        if not error <= TOLERANCE[shape.dtype]:
            log.warning("attention in place differs from gathered by %.1e for %s: not used", error, shape)
            return ALL_GATHERED
        gathered = frozenset(_slower_in_place(shape, slab))
    except Exception as reason:  # no compiler, too few registers, another Triton: gathering works in any case
        log.warning("attention in place is not used for %s: %s: %s", shape, type(reason).__name__, reason)
        return ALL_GATHERED
    finally:
        torch.cuda.set_rng_state(state, shape.device)
        torch.cuda.empty_cache()  # the memory that gathering took for the longest context
    log.info("attention of %s: gathers classes %s of queries and keys", shape, sorted(gathered))
    return Choice(gathered)


def _slower_in_place(shape: Shape, slab: torch.Tensor) -> list[Class]:
    """The classes in which gathering was faster."""
    slower: dict[Class, bool] = {}
    for num_queries, end in product(NUM_QUERIES, ENDS):
        if num_queries > end:
            continue
        segments = _segments(shape, slab.shape[0], num_queries, end, NUM_DECODING if num_queries == 1 else 1)
        kind = class_of(segments[0])
        if kind not in slower:
            in_place, gathered = both_ways(shape, slab, segments)
            slower[kind] = median_seconds(in_place) > median_seconds(gathered)
    return [kind for kind, is_slower in slower.items() if is_slower]


def largest_error(shape: Shape) -> float:
    """The largest difference of the two paths, as a share of the largest value: a short prompt and a decoding."""
    sizes = (40, 1, 2, shape.group.block_size, shape.num_kv_heads, shape.head_dim)
    slab = torch.randn(sizes, dtype=shape.dtype, device=shape.device)
    segments = _segments(shape, len(slab), 24, min(300, 40 * shape.group.block_size), 2)
    decoding = _segments(shape, len(slab), 1, min(301, 40 * shape.group.block_size), 1)
    worst = 0.0
    for parts in (segments, decoding):
        in_place, gathered = (call() for call in both_ways(shape, slab, parts))
        error = float((in_place - gathered).abs().max() / gathered.abs().max())
        worst = error if not error <= worst else worst  # NaN stays
    return worst


def _segments(shape: Shape, num_slots: int, num_queries: int, end: int, count: int) -> list[Segment]:
    """*count* requests that compute their last *num_queries* tokens before *end*, with blocks all over the slab."""
    num_blocks = -(-end // shape.group.block_size)
    places = [(7919 * i) % num_slots for i in range(count * num_blocks)]  # a prime: scattered, the same every time
    return [
        segment(
            shape.group,
            places[i * num_blocks : (i + 1) * num_blocks],
            slice(i * num_queries, (i + 1) * num_queries),
            end - num_queries,
            num_queries,
            shape.device,
        )
        for i in range(count)
    ]


def both_ways(
    shape: Shape, slab: torch.Tensor, segments: list[Segment]
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """One layer's attention by both paths, in place first. Work that a step does once for all layers is done here."""
    num_tokens, device, dtype = segments[-1].rows.stop, shape.device, shape.dtype
    query = torch.randn(1, num_tokens, shape.num_heads, shape.head_dim, dtype=dtype, device=device).transpose(1, 2)
    sinks = torch.zeros(shape.num_heads, dtype=dtype, device=device) if shape.has_sinks else None
    scoring = Scoring(shape.head_dim**-0.5, 30.0 if shape.has_softcap else None, sinks)
    output = torch.empty(num_tokens, shape.num_heads, shape.head_dim, dtype=dtype, device=device)
    packed = plan_for(shape, segments)
    scratch = Scratch()

    def in_place() -> torch.Tensor:
        attend_in_place(query, slab, 0, packed, shape.group, scoring, output)
        return output.clone()

    def gathered() -> torch.Tensor:
        attend_gathered(query, slab, 0, segments, scoring, output, scratch)
        return output.clone()

    return in_place, gathered


def plan_for(shape: Shape, segments: list[Segment]) -> Plan:
    """The plan of the segments of a step that are read in place."""
    return plan(segments, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype.itemsize, shape.device)


def median_seconds(call: Callable[[], torch.Tensor]) -> float:
    """The median seconds of a round of calls; infinite if memory is short."""
    rounds = []
    try:
        for _ in range(NUM_ROUNDS + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS_PER_ROUND):
                call()
            torch.cuda.synchronize()
            rounds.append(time.perf_counter() - begin)
    except torch.cuda.OutOfMemoryError:
        return float("inf")
    return statistics.median(rounds[1:])  # the first compiles
