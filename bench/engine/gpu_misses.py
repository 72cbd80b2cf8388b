"""What do the tiers cost on a GPU when nothing is ever reused? TTFT and tokens a second, with them and without."""

import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from bench.engine.gpu_shapes import Misses, Prompts, Shape, free_memory, tokenizer_of_one_word
from bench.engine.gpu_ttft import wait_pinned
from bench.gpu_progress import Clock
from bench.report import Row
from bench.rounds import at_least, at_most, spread
from kvtier import LLM, SamplingParams
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.transfer_engine import Route

ON, OFF = "on", "off"
COST = 0.02
WARM_UP_ROUNDS = 3  # fill every tier, so that each block evicts another; fewer if time is short
SETTLED_S = 20.0
ENOUGH = 4  # measurements for a spread


@dataclass(frozen=True)
class Turn:
    """Figures of one engine in one round."""

    ttft_s: float
    tokens_per_s: float


def cost_of_misses(model: PreTrainedModel, shape: Shape, clock: Clock) -> list[Row]:
    """Part (d): both engines get new prompts, in random order in each round."""
    misses, tokenizer = shape.misses, tokenizer_of_one_word()
    prompts, rng = Prompts(shape.model["vocab_size"]), random.Random(0)
    turns: dict[str, list[Turn]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder, ExitStack() as ends:
        configs = {
            ON: shape.tiers(misses.pools, folder),
            OFF: shape.tiers(replace(misses.pools, host=0)),
        }
        engines = {name: ends.enter_context(closing(LLM(model, config, tokenizer))) for name, config in configs.items()}
        wait_pinned(engines[ON], clock)
        took_s = 0.0
        for round_id in range(WARM_UP_ROUNDS + misses.rounds):
            if turns and clock.left < took_s:
                break
            counts = round_id >= WARM_UP_ROUNDS or clock.left < 2 * took_s
            started = time.monotonic()
            for name in rng.sample([ON, OFF], 2):
                turn = _turn(engines[name], prompts, misses)
                if counts:
                    turns[name].append(turn)
                _settle(engines[name])
            took_s = time.monotonic() - started
            clock.note(f"misses, round {round_id} of at most {WARM_UP_ROUNDS + misses.rounds - 1}: {took_s:.1f} s")
        counted = engines[ON].statistics().cache
        engines[ON].reset_prefix_cache()  # else closing would write what is left to disk
        engines.clear()
    free_memory()
    return [
        *miss_rows(turns),
        Row("0% hits: blocks dropped without a copy", counted.tiers[Tier.DEVICE].dropped_spills, ""),
        Row("0% hits: spilled to host meanwhile", counted.routes[Route.DEVICE_TO_HOST].num_bytes / 1e6, "MB"),
        Row("0% hits: written to disk meanwhile", counted.routes[Route.HOST_TO_DISK].num_bytes / 1e6, "MB"),
    ]


def _turn(llm: LLM, prompts: Prompts, misses: Misses) -> Turn:
    """Time the second of two prompts in a row, which bears the copies left by the first; then several at once."""
    for _ in range(2):
        done = llm.generate([prompts.new(misses.alone)], SamplingParams(max_tokens=1), progress=False)[0]
        if done.tokens.recomputed != misses.alone:
            raise RuntimeError(f"a new prompt was reused: {done.tokens}")
    several = [prompts.new(misses.at_once) for _ in range(misses.num_at_once)]
    sampling = SamplingParams(max_tokens=misses.max_tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(several, sampling, progress=False)
    took_s = time.perf_counter() - started
    return Turn(done.ttft_s, misses.num_at_once * (misses.at_once + misses.max_tokens) / took_s)


def _settle(llm: LLM) -> None:
    """Let the idle engine finish its copies before the other one's turn."""
    give_up_at = time.monotonic() + SETTLED_S
    llm.core.idle()
    while llm.core.cache.num_in_flight and time.monotonic() < give_up_at:
        llm.core.cache.wait(0.01)
        llm.core.idle()


def miss_rows(turns: Mapping[str, Sequence[Turn]]) -> list[Row]:
    """Rows of both engines' figures, and of the ratios in each round."""
    pairs = list(zip(turns[ON], turns[OFF], strict=True))
    slower = [on.ttft_s / off.ttft_s for on, off in pairs]
    throughput = [on.tokens_per_s / off.tokens_per_s for on, off in pairs]
    rows = []
    for name in (OFF, ON):
        rows.append(Row(f"0% hits: TTFT, tiers {name}", 1000 * statistics.median(t.ttft_s for t in turns[name]), "ms"))
        speed = statistics.median(turn.tokens_per_s for turn in turns[name])
        rows.append(Row(f"0% hits: prompt and new tokens, tiers {name}", speed, "tokens/s"))
    for ratios, row in (
        (slower, at_most("0% hits: TTFT, tiers on / off", statistics.median(slower), "", 1 + COST)),
        (throughput, at_least("0% hits: tokens/s, tiers on / off", statistics.median(throughput), 1 - COST)),
    ):
        rows.append(row)
        if len(ratios) >= ENOUGH:
            rows.append(Row("  spread of that", spread(ratios), "%"))
    return rows
