"""Attention in place equals attention computed plainly: interpreted on a CPU, compiled on a GPU."""

import os
import random
from dataclasses import dataclass, replace

import pytest
import torch
from small_models import VOCAB, build
from transformers import PreTrainedModel

from kvtier.engine.model import attention, paged_in_place
from kvtier.engine.model.paged_choice import ALL_GATHERED, Choice, Shape, choose
from kvtier.engine.model.paged_gather import Scoring, Scratch, attend_gathered
from kvtier.engine.model.paged_in_place import attend_in_place, plan, supports
from kvtier.engine.model.paged_segment import Segment, segment
from kvtier.engine.model.runner import Chunk, ModelRunner
from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, FullAttention, RecurrentState, SlidingWindow

pytest.importorskip("triton", reason="Triton is not installed (it is no part of torch for the CPU)")

# Triton looks for it when it is imported, which transformers does: too late to set it here.
INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1")
COMPILED = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=COMPILED)]
# Triton's interpreter multiplies matrices with numpy, which has no bfloat16.
TYPES = [
    pytest.param("cpu", torch.float32, marks=INTERPRETED, id="interpreted-float32"),
    pytest.param("cpu", torch.float16, marks=INTERPRETED, id="interpreted-float16"),
    pytest.param("cuda", torch.float32, marks=COMPILED, id="cuda-float32"),
    pytest.param("cuda", torch.float16, marks=COMPILED, id="cuda-float16"),
    pytest.param("cuda", torch.bfloat16, marks=COMPILED, id="cuda-bfloat16"),
]
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NUM_SLOTS, NUM_LAYERS, LAYER = 60, 3, 1
MIXED = ((0, 37), (90, 1), (70, 21), (0, 1), (97, 40))  # start, num_tokens: prefill, decoding, a suffix …
DECODING = ((90, 1), (0, 1), (200, 1), (15, 1))


@dataclass(frozen=True)
class Case:
    """A step of one group of layers."""

    group: AttentionGroup
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    spans: tuple[tuple[int, int], ...] = MIXED
    softcap: float | None = None
    has_sinks: bool = False
    scale: float = 0.2
    num_programs: int = 1  # more: keys are split


CASES = {
    "full": Case(FullAttention(16)),
    "sliding": Case(SlidingWindow(16, 40)),
    "sliding by one token": Case(SlidingWindow(16, 1)),
    "sliding, longer than tiles": Case(SlidingWindow(16, 130), spans=((0, 150), (199, 1), (160, 50))),
    "chunked": Case(ChunkedLocal(16, 48)),
    "softcap": Case(FullAttention(16), softcap=2.0, scale=1.0),
    "sinks": Case(FullAttention(16), has_sinks=True),
    "sinks, sliding, softcap": Case(SlidingWindow(16, 20), has_sinks=True, softcap=3.0),
    "one head each": Case(FullAttention(16), num_heads=2),
    "three heads share": Case(FullAttention(16), num_heads=3, num_kv_heads=1),
    "seven heads share": Case(FullAttention(16), num_heads=14),
    "twenty heads share": Case(FullAttention(16), num_heads=20, num_kv_heads=1),
    "head of 80": Case(FullAttention(16), head_dim=80),
    "head of 8": Case(FullAttention(16), head_dim=8),
    "head of 256": Case(FullAttention(16), head_dim=256, num_heads=2, num_kv_heads=1, spans=MIXED[:3], scale=0.06),
    "blocks of 1": Case(FullAttention(1), spans=((5, 30), (19, 1))),
    "blocks of 5": Case(SlidingWindow(5, 12), spans=MIXED[:4]),
    "blocks of 128": Case(FullAttention(128)),
    "decoding in splits": Case(FullAttention(16), spans=DECODING, num_programs=12),
    "decoding in splits, sinks": Case(FullAttention(16), spans=DECODING, num_programs=12, has_sinks=True),
    "decoding in splits, sliding": Case(SlidingWindow(16, 100), spans=DECODING, num_programs=12),
    "a suffix in splits": Case(FullAttention(16), spans=((90, 9), (60, 20)), num_programs=20, softcap=5.0),
    "a suffix in splits, chunked": Case(ChunkedLocal(16, 70), spans=((120, 9), (60, 30)), num_programs=20),
    "more splits than a merge takes at once": Case(FullAttention(8), spans=((900, 1),), num_programs=60),
}


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make splits short, so that small cases have several."""
    monkeypatch.setattr(paged_in_place, "MIN_SPLIT_KEYS", 16)


@dataclass(frozen=True)
class Bench:
    """Tensors of a case. All that no query may read is NaN: other slots and layers, tails, keys before a window."""

    case: Case
    query: torch.Tensor
    slab: torch.Tensor
    segments: list[Segment]
    scoring: Scoring
    expected: torch.Tensor  # [num_tokens, num_heads, head_dim] float64

    def in_place(self, segments: list[Segment] | None = None) -> torch.Tensor:
        """The output of the kernels."""
        case, device = self.case, self.slab.device
        output = torch.full_like(self.expected, float("nan"), dtype=self.slab.dtype)
        packed = plan(
            self.segments if segments is None else segments,
            case.num_heads,
            case.num_kv_heads,
            case.head_dim,
            self.slab.element_size(),
            device,
            case.num_programs,
        )
        attend_in_place(self.query, self.slab, LAYER, packed, case.group, self.scoring, output)
        return output


def bench(case: Case, device: str, dtype: torch.dtype) -> Bench:
    rng, draw = random.Random(5), torch.Generator().manual_seed(5)
    size, num_tokens = case.group.block_size, sum(span[1] for span in case.spans)
    blocks = [-(-(start + count) // size) for start, count in case.spans]
    slots = iter(rng.sample(range(sum(blocks) + NUM_SLOTS), sum(blocks)))
    shape = (sum(blocks) + NUM_SLOTS, NUM_LAYERS, 2, size, case.num_kv_heads, case.head_dim)
    slab = torch.full(shape, float("nan"), dtype=dtype)
    query = torch.randn(1, num_tokens, case.num_heads, case.head_dim, generator=draw).to(dtype)
    sinks = torch.randn(case.num_heads, generator=draw).to(dtype) if case.has_sinks else None
    segments, expected, row = [], [], 0
    for (start, count), num_blocks in zip(case.spans, blocks, strict=True):
        table = [next(slots) for _ in range(num_blocks)]
        first = oldest(case.group, start)
        kv = torch.full((2, start + count, case.num_kv_heads, case.head_dim), float("nan"), dtype=dtype)
        kv[:, first:] = torch.randn(kv[:, first:].shape, generator=draw).to(dtype)
        for position in range(first, start + count):
            slab[table[position // size], LAYER, :, position % size] = kv[:, position]
        segments.append(segment(case.group, table, slice(row, row + count), start, count, torch.device(device)))
        expected.append(plainly(case, query[0, row : row + count], kv, start, sinks))
        row += count
    sinks = None if sinks is None else sinks.to(device)
    scoring = Scoring(case.scale, case.softcap, sinks)
    return Bench(
        case, query.transpose(1, 2).to(device), slab.to(device), segments, scoring, torch.cat(expected).to(device)
    )


def oldest(group: AttentionGroup, position: int) -> int:
    """The first token that a query reads, computed from the kind's definition."""
    match group:
        case SlidingWindow(window_tokens=window):
            return max(0, position - (window - 1))
        case ChunkedLocal(chunk_tokens=chunk):
            return position - position % chunk
        case _:
            return 0


def plainly(case: Case, query: torch.Tensor, kv: torch.Tensor, start: int, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention of one query and head after the other, over the keys that it reads, in float64."""
    rows = []
    for i in range(len(query)):
        keys, values = kv[:, oldest(case.group, start + i) : start + i + 1].double()
        for head in range(case.num_heads):
            kv_head = head * case.num_kv_heads // case.num_heads
            scores = keys[:, kv_head] @ query[i, head].double() * case.scale
            if case.softcap is not None:
                scores = torch.tanh(scores / case.softcap) * case.softcap
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double()[None]])
            rows.append(torch.softmax(scores, 0)[: len(values)] @ values[:, kv_head])
    return torch.stack(rows).view(len(query), case.num_heads, -1)


@pytest.mark.long
@pytest.mark.parametrize(("device", "dtype"), TYPES)
@pytest.mark.parametrize("name", CASES)
def test_attention_in_place_is_right_and_reads_nothing_that_no_query_reads(
    name: str, device: str, dtype: torch.dtype
) -> None:
    if (device, dtype) == ("cpu", torch.float16) and name not in ("full", "sinks, sliding, softcap", "head of 80"):
        pytest.skip("interpreted float16: large tiles, in a few cases")
    there = bench(CASES[name], device, dtype)

    error = (there.in_place().double() - there.expected).abs().max()

    assert error <= TOLERANCE[dtype]  # False for NaN


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["sliding", "decoding in splits", "a suffix in splits"])
def test_a_segment_gets_the_same_bytes_alone_and_beside_others(name: str, device: str) -> None:
    there = bench(CASES[name], device, torch.float32)
    together = there.in_place()

    for part in there.segments:
        alone = there.in_place([part])[part.rows]

        assert torch.equal(alone, together[part.rows])


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_queries_and_sinks_may_lie_in_memory_in_any_way(device: str) -> None:
    there = bench(CASES["sinks"], device, torch.float32)
    expected = there.in_place()

    head_major = replace(there, query=there.query.contiguous()).in_place()
    strided = replace(there, query=there.query.transpose(2, 3).contiguous().transpose(2, 3)).in_place()

    assert torch.equal(head_major, expected)
    assert torch.equal(strided, expected)


def test_what_the_kernels_cannot_do_is_known_beforehand() -> None:
    device, group = torch.device("cuda"), FullAttention(16)

    assert supports(device, torch.bfloat16, 32, 8, 256, group)
    assert supports(device, torch.float32, 128, 1, 40, SlidingWindow(7, 12))
    assert not supports(device, torch.bfloat16, 32, 8, 288, group)
    assert not supports(device, torch.float64, 32, 8, 128, group)
    assert not supports(device, torch.bfloat16, 256, 1, 128, group)
    assert not supports(device, torch.bfloat16, 32, 8, 128, RecurrentState(16))


def logits(model: PreTrainedModel, choice: Choice, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The logits of each of several steps that compute two requests."""
    monkeypatch.setattr(attention, "choose", lambda *_: choice)
    runner = ModelRunner(model, 16, 4 << 20)
    rng = random.Random(6)
    prompts = [[rng.randrange(VOCAB) for _ in range(120)] for _ in range(2)]
    places = [rng.sample(range(runner.num_slots), 16) for _ in runner.groups]
    tables = [[table[:8] for table in places], [table[8:] for table in places]]
    starts, rows = [0, 0], []
    for counts in ((40, 17), (1, 30), (1, 1), (20, 1)):
        chunks = []
        for i, count in enumerate(counts):
            chunks.append(Chunk(prompts[i][starts[i] : starts[i] + count], starts[i], tables[i]))
            starts[i] += count
        rows.append(runner.run(chunks).cpu())
    runner.close()
    return torch.cat(rows)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", pytest.param("mistral", marks=pytest.mark.slow), "gpt_oss"])
def test_a_model_answers_the_same_in_place_as_over_gathered_blocks(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name, device, spread=0.02)

    gathered = logits(model, ALL_GATHERED, monkeypatch)
    in_place = logits(model, Choice(frozenset()), monkeypatch)

    assert (gathered - in_place).abs().max() <= 1e-5
    assert torch.equal(gathered.argmax(-1), in_place.argmax(-1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [FullAttention(16), SlidingWindow(16, 1024)], ids=["full", "sliding"])
def test_the_choice_is_measured_once_and_its_paths_agree(group: AttentionGroup, dtype: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    shape = Shape(device, dtype, 8, 2, 64, group, has_softcap=False, has_sinks=False)
    slab = torch.randn(600, 2, 2, 16, 2, 64, device=device, dtype=dtype)

    choice = choose(shape, slab)

    assert choose(shape, slab) is choice
    tables = [list(range(i, 600, 3)) for i in range(3)]
    segments = [segment(group, table, slice(40 * i, 40 * (i + 1)), 1000, 40, device) for i, table in enumerate(tables)]
    query = torch.randn(1, 8, 120, 64, device=device, dtype=dtype)
    outputs = [torch.empty(120, 8, 64, device=device, dtype=dtype) for _ in range(2)]
    scoring = Scoring(0.125)
    packed = plan(segments, 8, 2, 64, dtype.itemsize, device)
    attend_in_place(query, slab, 1, packed, group, scoring, outputs[0])
    attend_gathered(query, slab, 1, segments, scoring, outputs[1], Scratch())
    assert (outputs[0] - outputs[1]).abs().max() <= 2 * TOLERANCE[dtype]
