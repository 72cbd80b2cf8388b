"""What does it cost to draw the tokens of a step? All rows in one pass, against each row alone as before it."""

import statistics
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.report import Row, arguments, publish
from bench.rounds import Side, alternate, at_most, ratio_of, ready
from kvtier.engine.model.drawing.draws import sample_tokens
from kvtier.engine.model.drawing.sampler import Sampler
from kvtier.engine.model.sampling import SamplingParams

NUM_ROWS = 32
VOCAB = 152_064  # Qwen's
QUICK_VOCAB = 2_000
MODULE = "engine/model/sampling.py"  # where the sampler of one row was
MAX = 0.2  # of the time before
# Spread of random logits: of flat ones top-p 0.95 keeps 30,000 tokens, of peaked ones 80, as of a trained model's.
SPREADS = {"flat": 2.5, "peaked": 6.0}


@dataclass(frozen=True)
class Case:
    """One kind of step: parameters of its requests, which take turns, and whether the time was promised."""

    name: str
    kinds: Sequence[dict[str, float]]
    spread: str
    is_promised: bool = False
    has_baseline: bool = True  # the sampler before knows the parameters


CASES = (
    Case("top-p 0.95, flat", [{"temperature": 1.0, "top_p": 0.95}], "flat", is_promised=True),
    Case("top-p 0.95, peaked", [{"temperature": 1.0, "top_p": 0.95}], "peaked"),
    Case("top-k 50", [{"temperature": 1.0, "top_k": 50}], "peaked"),
    Case("temperature 1", [{"temperature": 1.0}], "peaked"),
    Case("greedy", [{}], "peaked"),
    Case(
        "greedy, top-k 50, top-p 0.95, temperature 1",
        [{}, {"temperature": 1.0, "top_k": 50}, {"temperature": 1.0, "top_p": 0.95}, {"temperature": 1.0}],
        "peaked",
    ),
    Case("min-p 0.05", [{"temperature": 1.0, "min_p": 0.05}], "peaked", has_baseline=False),
    Case(
        "top-p 0.95, three penalties, prompts of 2,000",
        [{"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "presence_penalty": 0.5}],
        "peaked",
        has_baseline=False,
    ),
)


def sampler_before(commit: str) -> types.ModuleType:
    """The module with the sampler of one row, as *commit* has it."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["git", "-C", str(root), "show", f"{commit}:{MODULE}"], capture_output=True, text=True, check=True
    )
    module = types.ModuleType("sampling_before")
    sys.modules[module.__name__] = module  # dataclasses look for it there
    exec(compile(done.stdout, f"{commit}:{MODULE}", "exec"), module.__dict__)
    return module


def one_by_one(
    before: types.ModuleType, params: Sequence[dict[str, float]], logits: torch.Tensor
) -> Callable[[], None]:
    """Draw a token of each row, one row after the other."""
    samplers = [before.Sampler(before.SamplingParams(**p, seed=i)) for i, p in enumerate(params)]

    def draw() -> None:
        for sampler, row in zip(samplers, logits, strict=True):
            sampler.sample(row)

    return draw


def in_one_pass(params: Sequence[dict[str, float]], logits: torch.Tensor) -> Callable[[], list[int]]:
    """Draw a token of each row in one pass."""
    source = torch.Generator().manual_seed(1)
    prompts = [torch.randint(logits.shape[1], (2000,), generator=source).tolist() for _ in params]
    samplers = [
        Sampler(SamplingParams(**p, seed=i), prompt)  # type: ignore[arg-type]  # counts are whole
        for i, (p, prompt) in enumerate(zip(params, prompts, strict=True))
    ]
    return lambda: sample_tokens(logits, samplers)


def rows_of(case: Case, before: types.ModuleType, num_rounds: int, vocab_size: int) -> list[Row]:
    """Time both ways in turn; the rows of one case."""
    source = torch.Generator().manual_seed(0)
    logits = SPREADS[case.spread] * torch.randn(NUM_ROWS, vocab_size, generator=source)
    params = [case.kinds[i % len(case.kinds)] for i in range(NUM_ROWS)]
    sides = [Side("one pass", ready(in_one_pass(params, logits)))]
    if case.has_baseline:
        sides.append(Side("before", ready(one_by_one(before, params, logits))))
    times = alternate(sides, num_rounds)
    rows = [Row(f"{case.name}: {name}", 1000 * statistics.median(took), "ms") for name, took in times.items()]
    if case.has_baseline:
        ratio = ratio_of(times["one pass"], times["before"])
        name = f"{case.name}: one pass / before"
        rows.append(at_most(name, ratio, "", MAX) if case.is_promised else Row(name, ratio, ""))
    return rows


def main() -> None:
    """Time each case on one thread, as an engine beside a full machine has it."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="steps of each way (9)")
    parser.add_argument("--before", default="f5621a3", metavar="COMMIT", help="whose sampler is compared (f5621a3)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = sampler_before(options.before)
    num_rounds, vocab_size = options.rounds or options.effort.of(9, quick=1), options.effort.of(VOCAB, QUICK_VOCAB)
    rows = [row for case in CASES for row in rows_of(case, before, num_rounds, vocab_size)]
    publish("sampling", rows, options.json)


if __name__ == "__main__":
    main()
