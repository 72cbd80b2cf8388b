"""Is attention faster when it reads the slab in place, or over gathered blocks? And does kvtier choose the faster way?

One layer of Llama 3.1 8B (32 heads, 8 of keys, of 128) in bfloat16 on a CUDA device computes a suffix after a cached
prefix, and decodes. Medians of rounds in which both ways take turns, with the blocks of a prompt all over the slab.
Gathering copies the blocks first and then calls torch's attention, request by request.
"""

import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from bench.report import Row, arguments, publish
from kvtier.engine.model.paged_choice import Shape, choose, plan_for
from kvtier.engine.model.paged_gather import Scoring, Scratch, attend_gathered
from kvtier.engine.model.paged_in_place import attend_in_place
from kvtier.engine.model.paged_segment import segment
from kvtier.tiers.naming.groups import FullAttention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DTYPE = 32, 8, 128, torch.bfloat16
BLOCK_SIZES = (16, 64)
NUM_LAYERS, LAYER = 2, 1  # the layers of a block are beside each other; two are enough to show that
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
CALLS_PER_ROUND = 4  # calls in a row, as layers follow each other
COPY_BYTES = 1 << 30
LEEWAY = 1.1  # how much slower the chosen way may be in another measurement
KIB = 1024


@dataclass(frozen=True)
class Size:
    """The shapes that are compared, and how often."""

    suffixes: tuple[int, ...] = (128, 1024, 4096)
    prefixes: tuple[int, ...] = (4096, 32768, 131072)
    batches: tuple[int, ...] = (1, 8, 64)
    contexts: tuple[int, ...] = (4096, 32768)
    num_rounds: int = 9


QUICK = Size((128,), (4096,), (1, 8), (4096,), 2)


def seconds(calls: list[Callable[[], None]], num_rounds: int) -> list[float]:
    """Median seconds of each of *calls*, which take turns. Time to launch shows where it is the longest part."""
    rounds: list[list[float]] = [[] for _ in calls]
    for _ in range(num_rounds + 1):
        for call, times in zip(calls, rounds, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            for _ in range(CALLS_PER_ROUND):
                call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1000 / CALLS_PER_ROUND)
    return [statistics.median(times[1:]) for times in rounds]


def copy_speed(device: torch.device, num_rounds: int) -> float:
    """GB/s of a copy on the device, read and written: the roof of attention that is bound by memory."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    (took,) = seconds([copy], num_rounds)
    return 2 * COPY_BYTES / took / 1e9


def new_slab(block_size: int, num_tokens: int, device: torch.device) -> torch.Tensor:
    """A slab of random keys and values for *num_tokens*, or for as many as half of the free memory holds."""
    free, _ = torch.cuda.mem_get_info(device)
    num_slots = min(num_tokens, free // 2 // (TOKEN_BYTES * NUM_LAYERS)) // block_size
    return torch.randn(num_slots, NUM_LAYERS, 2, block_size, NUM_KV_HEADS, HEAD_DIM, device=device, dtype=DTYPE)


def compare(
    name: str, slab: torch.Tensor, count: int, start: int, num_tokens: int, roof: float, num_rounds: int
) -> list[Row]:
    """Rows of *count* requests that compute *num_tokens* from *start* on, both ways. *roof* is the speed of a copy."""
    group, device = FullAttention(slab.shape[3]), slab.device
    shape = Shape(device, DTYPE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, group, has_softcap=False, has_sinks=False)
    end = start + num_tokens
    num_blocks = -(-end // group.block_size)
    order = random.Random(1).sample(range(slab.shape[0]), slab.shape[0])
    segments = []
    for i in range(count):
        table = [order[(i * num_blocks + place) % len(order)] for place in range(num_blocks)]
        rows = slice(i * num_tokens, (i + 1) * num_tokens)
        segments.append(segment(group, table, rows, start, num_tokens, device))
    query = torch.randn(1, count * num_tokens, NUM_HEADS, HEAD_DIM, device=device, dtype=DTYPE).transpose(1, 2)
    output = torch.empty(count * num_tokens, NUM_HEADS, HEAD_DIM, device=device, dtype=DTYPE)
    scoring, scratch, packed = Scoring(HEAD_DIM**-0.5), Scratch(), plan_for(shape, segments)

    gathered, in_place = seconds(
        [
            lambda: attend_gathered(query, slab, LAYER, segments, scoring, output, scratch),
            lambda: attend_in_place(query, slab, LAYER, packed, group, scoring, output),
        ],
        num_rounds,
    )
    is_in_place = choose(shape, slab).in_place(segments[0])
    chosen, other = (in_place, gathered) if is_in_place else (gathered, in_place)
    rows_out = [
        Row(f"{name}: gathered", gathered * 1e3, "ms"),
        Row(f"{name}: in place", in_place * 1e3, "ms"),
        Row(f"  chosen: {'in place' if is_in_place else 'gathered'}, faster by", other / chosen, "x",
            f">= {1 / LEEWAY:.2f}", chosen <= LEEWAY * other, varies=True),
    ]  # fmt: skip
    if num_tokens == 1:
        speed = count * end * TOKEN_BYTES / in_place / 1e9
        rows_out.append(Row("  in place: of the speed of a copy", 100 * speed / roof, "%"))
    else:
        num_scores = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        rows_out.append(
            Row("  in place: arithmetic", 4 * NUM_HEADS * HEAD_DIM * num_scores / in_place / 1e12, "TFLOP/s")
        )
    return rows_out


@torch.inference_mode()
def main() -> None:
    """Compare both ways for all shapes."""
    options = arguments((__doc__ or "").partition("\n")[0]).parse_args()
    if not torch.cuda.is_available():
        print("paged_attention: needs a CUDA device, and torch sees none", file=sys.stderr)
        sys.exit(2)
    device = torch.device("cuda", torch.cuda.current_device())
    size: Size = options.effort.of(Size(), QUICK)
    roof = copy_speed(device, size.num_rounds)
    rows = [Row(f"copy on {torch.cuda.get_device_name(device)}, read and written", roof, "GB/s")]
    for block_size in BLOCK_SIZES:
        slab = new_slab(block_size, max(size.batches) * max(size.contexts), device)
        for prefix, suffix in product(size.prefixes, size.suffixes):
            name = f"{suffix} on {prefix // KIB}k, block {block_size}"
            rows += compare(name, slab, 1, prefix, suffix, roof, size.num_rounds)
        for context, batch in product(size.contexts, size.batches):
            name = f"decode {batch} at {context // KIB}k, block {block_size}"
            rows += compare(name, slab, batch, context - 1, 1, roof, size.num_rounds)
        del slab
        torch.cuda.empty_cache()
    publish("paged_attention", rows, options.json)


if __name__ == "__main__":
    main()
