"""Choice: whether attention reads KV blocks in place or gathers (copies) them first, whichever is faster.

A segment is the tokens of one request in one step. Segments are divided into size classes by their numbers of queries
and keys. For each class, the speeds of both paths are measured at load, so that no request waits for the measurement.
The choice for a `Shape` then stays the same for the life of the process, so it does not depend on earlier requests.

Blocks are always gathered if the device is a CPU, if Triton is missing, or if the kernel does not compile or gives
wrong results. On a CPU, `cpu.row_attention` may compute single tokens, without either path.

The two paths round differently, and another process may choose another path. So two computations of a block may differ
in the last bits, as they do with another chunk size or batch. This is harmless, because kvtier never compares the
bytes of two computations. Once a block is published under its name, its bytes never change: tiers only copy them, and a
request that computes the block again adopts the first copy.
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

# Numbers of queries and prompt lengths that are measured. The bounds between the classes of queries and of keys are
# about halfway between them on a logarithmic scale.
NUM_QUERIES, QUERY_BOUNDS = (1, 64, 1024), (1, 256)
ENDS, KEY_BOUNDS = (512, 4096, 32768), (1448, 11585)
NUM_DECODING = 8  # requests per measured decoding step, because decoding runs in batches
# A round makes several calls without waiting, as a model's layers do, so that launch overhead counts only where it is
# the bottleneck.
NUM_ROUNDS, CALLS_PER_ROUND = 5, 4


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of a layer's attention that determine its speed, besides the numbers of queries and keys."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    group: AttentionGroup
    has_softcap: bool
    has_sinks: bool


Class = tuple[int, int]  # size class of a segment: its ranges of QUERY_BOUNDS and KEY_BOUNDS, numbered from 0


@dataclass(frozen=True, slots=True)
class Choice:
    """A rule: for which numbers of queries and keys attention copies KV blocks instead of reading them in place."""

    gathered: frozenset[Class]  # the sizes for which blocks are copied first

    def in_place(self, part: Segment) -> bool:
        """Return whether attention reads the KV blocks of this segment in place, without copying them first."""
        return class_of(part) not in self.gathered


ALL_GATHERED = Choice(frozenset(product(range(len(NUM_QUERIES)), range(len(ENDS)))))


def class_of(part: Segment) -> Class:
    """Return the size class of a segment (one request's tokens in a step), by its numbers of queries and keys."""
    return bisect.bisect_left(QUERY_BOUNDS, part.num_queries), bisect.bisect_left(KEY_BOUNDS, part.num_keys)


_choices: dict[Shape, Choice] = {}  # per process, because two engines of one shape must choose alike


def choose(shape: Shape, slab: torch.Tensor) -> Choice:
    """Choose for which numbers of queries and keys attention copies KV blocks first instead of reading them in place.

    The first call for a *shape* measures both ways on *slab*, without changing the slab. It blocks the caller for about
    a second, or longer if Triton has to compile the kernels first.
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
    # Restored below, so that a model that is being loaded draws the same random numbers as without the measurement.
    state = torch.cuda.get_rng_state(shape.device)
    try:
        error = largest_error(shape)
        if not error <= TOLERANCE[shape.dtype]:
            log.warning(
                "attention that reads blocks in place differs by %.1e from attention over gathered blocks, for %s; "
                "blocks will be gathered",
                error,
                shape,
            )
            return ALL_GATHERED
        gathered = frozenset(_slower_in_place(shape, slab))
    except Exception as reason:  # no compiler, too few registers, another Triton: gathering always works
        log.warning(
            "attention cannot read blocks in place for %s: %s: %s; blocks will be gathered",
            shape,
            type(reason).__name__,
            reason,
        )
        return ALL_GATHERED
    finally:
        torch.cuda.set_rng_state(state, shape.device)
        torch.cuda.empty_cache()  # free the memory that gathering used for the longest context
    log.info(
        "attention of %s: KV blocks will be gathered (copied first) for requests of these size classes, and read in "
        "place for all others: %s; a size class (q, k) has the q-th range of the number of queries and the k-th range "
        "of the number of keys, and 0 is the lowest range",
        shape,
        sorted(gathered),
    )
    return Choice(gathered)


def _slower_in_place(shape: Shape, slab: torch.Tensor) -> list[Class]:
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
    """Return the largest difference between attention over KV blocks in place and attention over copied blocks.

    Both compute a short prompt and a decoding step. The result is a fraction of the largest value.
    """
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
    """Return *count* segments, each of which computes the *num_queries* tokens before position *end*.

    Their blocks are scattered over the slab.
    """
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
    """Return two functions that compute one layer's attention: in place, and over gathered blocks.

    The functions do only the work of one layer. Work that a step does once for all layers, such as planning, is already
    done.
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
    """Plan the kernel launches that compute attention for *segments* and read their KV blocks in place."""
    return plan(segments, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype.itemsize, shape.device)


def median_seconds(call: Callable[[], torch.Tensor]) -> float:
    """Return the median seconds of several rounds of `CALLS_PER_ROUND` calls; infinity if memory is short."""
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
