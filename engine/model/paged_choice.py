"""Choice: whether a segment's attention reads blocks in place or gathers them, whichever was faster on this device.

The speeds are measured once per process for each `Shape`, when a model's attention runs for the first time. This
happens at load, when `ModelRunner` compares the model with its own attention, so no request waits for it. For one class
of queries and keys the choice is fixed as long as the process lives, also for a second engine, so a request's path does
not depend on earlier requests. Blocks are gathered on a CPU, without Triton, and if the kernel does not compile or its
results differ. No choice is made for single tokens on a CPU that `cpu.row_attention` computes.

Equal names do not imply equal last bits: the two paths round differently, and another process may measure other speeds,
just as another chunk size or batch rounds differently. A name stands for equal tokens under equal weights, and bytes
published under it never change: a request that recomputes a block adopts the first copy, and tiers only copy. Nothing
compares the bytes of two computations.
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
from kvtier.engine.model.paged_in_place import LaunchPlan, attend_in_place, plan, supports
from kvtier.engine.model.paged_segment import Segment, segment
from kvtier.tiers.naming.groups import AttentionGroup

log = logging.getLogger(__name__)

# Measured sizes, and the bounds between their classes (about halfway on a logarithmic scale).
NUM_QUERIES, QUERY_BOUNDS = (1, 64, 1024), (1, 256)
ENDS, KEY_BOUNDS = (512, 4096, 32768), (1448, 11585)
NUM_DECODING = 8  # requests per measured decoding step, because decoding runs in batches
# Several calls follow each other as layers do, so that launch overhead counts where it is the bottleneck.
NUM_ROUNDS, CALLS_PER_ROUND = 5, 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything except the numbers of queries and keys that determines the speed of a layer's attention."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    group: AttentionGroup
    has_softcap: bool
    has_sinks: bool


Class = tuple[int, int]  # class of a segment: the ranges of QUERY_BOUNDS and KEY_BOUNDS that it falls into


@dataclass(frozen=True, slots=True)
class Choice:
    """The set of segment classes that are gathered. Segments of all other classes are read in place."""

    gathered: frozenset[Class]

    def in_place(self, part: Segment) -> bool:
        """Return whether the segment is read in place."""
        return class_of(part) not in self.gathered


ALL_IN_PLACE = Choice(frozenset())
ALL_GATHERED = Choice(frozenset(product(range(len(NUM_QUERIES)), range(len(ENDS)))))


def class_of(part: Segment) -> Class:
    """Return the class of a segment."""
    return bisect.bisect_left(QUERY_BOUNDS, part.num_queries), bisect.bisect_left(KEY_BOUNDS, part.num_keys)


_choices: dict[Shape, Choice] = {}  # per process, because two engines of one shape must choose alike


def choose(shape: Shape, slab: torch.Tensor) -> Choice:
    """Return the choice for *shape*, measured on *slab* the first time. The slab is only read.

    Measuring blocks for about a second, and longer when Triton compiles for the first time on a machine.
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
    # The model being loaded must draw the same random numbers as without the measurement.
    state = torch.cuda.get_rng_state(shape.device)
    try:
        error = largest_error(shape)
        if not error <= TOLERANCE[shape.dtype]:
            log.warning("attention in place differs from gathered by %.1e for %s; gathering blocks", error, shape)
            return ALL_GATHERED
        gathered = frozenset(_slower_in_place(shape, slab))
    except Exception as reason:  # no compiler, too few registers, another Triton: gathering always works
        log.warning("attention in place is not used for %s: %s: %s", shape, type(reason).__name__, reason)
        return ALL_GATHERED
    finally:
        torch.cuda.set_rng_state(state, shape.device)
        torch.cuda.empty_cache()  # free the memory that gathering used for the longest context
    log.info("attention of %s: gathering blocks for classes %s of queries and keys", shape, sorted(gathered))
    return Choice(gathered)


def _slower_in_place(shape: Shape, slab: torch.Tensor) -> list[Class]:
    """Return the classes in which gathering was faster."""
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
    """Return the paths' largest difference as a fraction of the largest value, for a short prompt and a decoding."""
    sizes = (40, 1, 2, shape.group.block_size, shape.num_kv_heads, shape.head_dim)
    slab = torch.randn(sizes, dtype=shape.dtype, device=shape.device)
    segments = _segments(shape, len(slab), 24, min(300, 40 * shape.group.block_size), 2)
    decoding = _segments(shape, len(slab), 1, min(301, 40 * shape.group.block_size), 1)
    worst = 0.0
    for parts in (segments, decoding):
        in_place, gathered = (call() for call in both_ways(shape, slab, parts))
        error = float((in_place - gathered).abs().max() / gathered.abs().max())
        worst = error if not error <= worst else worst  # keeps NaN
    return worst


def _segments(shape: Shape, num_slots: int, num_queries: int, end: int, count: int) -> list[Segment]:
    """Return *count* segments that compute the *num_queries* tokens before *end*, with blocks all over the slab."""
    num_blocks = -(-end // shape.group.block_size)
    places = [(7919 * i) % num_slots for i in range(count * num_blocks)]  # a prime scatters them deterministically
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
    """Return calls that compute one layer's attention in place and gathered, respectively.

    The work that a step does once for all layers is done here rather than in the calls.
    """
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


def plan_for(shape: Shape, segments: list[Segment]) -> LaunchPlan:
    """Return the plan of the segments of a step that are read in place."""
    return plan(segments, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype.itemsize, shape.device)


def median_seconds(call: Callable[[], torch.Tensor]) -> float:
    """Return the median seconds of a round of calls; infinity if memory is short."""
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
