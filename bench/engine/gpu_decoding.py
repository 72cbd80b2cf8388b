"""Does decoding go on at full speed while the blocks that it pushes out are copied down?"""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

from transformers import PreTrainedModel

from bench.engine.gpu_shapes import Decoding, Pools, Prompts, Shape, free_memory, tokenizer_of_one_word
from bench.engine.gpu_ttft import wait_pinned
from bench.gpu_progress import Clock
from bench.report import Row
from bench.rounds import at_least, spread
from kvtier import LLM, SamplingParams
from kvtier.engine.scheduling.request import Request
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.transfer_engine import Route

NO_SPILL, CLEAN_AHEAD, ON_EVICT = "no spill", "clean-ahead", "spill-on-evict"
MIN = 0.97  # promised share of the speed without spilling
ENOUGH = 4  # measurements for a spread


@dataclass(frozen=True)
class Spilled:
    """Blocks that an engine has evicted and bytes that it has copied down, so far or between two moments."""

    evicted: int = 0  # blocks, on the device
    dropped: int = 0  # of these, blocks that no other tier had
    num_bytes: int = 0

    def since(self, earlier: "Spilled") -> "Spilled":
        return Spilled(
            self.evicted - earlier.evicted, self.dropped - earlier.dropped, self.num_bytes - earlier.num_bytes
        )

    def plus(self, other: "Spilled") -> "Spilled":
        return Spilled(self.evicted + other.evicted, self.dropped + other.dropped, self.num_bytes + other.num_bytes)


@dataclass
class Side:
    """One engine. With *waits* each step waits for its copies, as if blocks were spilled only when they are evicted."""

    name: str
    llm: LLM
    waits: bool = False
    requests: list[Request] = field(default_factory=list)
    decoding: Spilled = Spilled()
    prefilling: Spilled = Spilled()

    def prefill(self, prompts: Sequence[list[int]], max_tokens: int) -> None:
        """Compute new *prompts* until all of these requests decode."""
        before = self._spilled()
        core, sampling = self.llm.core, SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.requests = [core.add(prompt, sampling, NO_EXTRA_KEYS, time.monotonic()) for prompt in prompts]
        while not all(request.is_decoding for request in self.requests):
            self._step()
        self.prefilling = self.prefilling.plus(self._spilled().since(before))

    def decode(self, num_steps: int) -> float:
        """Decode *num_steps* steps; tokens a second. RuntimeError if a request was preempted."""
        before, started = self._spilled(), time.perf_counter()
        num_tokens = sum(self._step() for _ in range(num_steps))
        took_s = time.perf_counter() - started
        if num_tokens != num_steps * len(self.requests):
            raise RuntimeError(f"{self.name}: {num_tokens} tokens in {num_steps} steps; a request was pushed out")
        self.decoding = self.decoding.plus(self._spilled().since(before))
        return num_tokens / took_s

    def end(self) -> None:
        """End the batch; its blocks stay cached."""
        for request in self.requests:
            self.llm.core.abort(request)

    def _step(self) -> int:
        num_tokens = len(self.llm.core.step())
        while self.waits and self.llm.core.cache.num_in_flight:
            self.llm.core.cache.wait(0.05)
        return num_tokens

    def _spilled(self) -> Spilled:
        statistics_now = self.llm.core.cache.statistics()
        device, route = statistics_now.tiers[Tier.DEVICE], statistics_now.routes[Route.DEVICE_TO_HOST]
        return Spilled(device.num_evicted, device.dropped_spills, route.num_bytes)


def decoding_speed(model: PreTrainedModel, shape: Shape, clock: Clock) -> list[Row]:
    """Part (c): all engines compute batches of new prompts, and then decode in turn, in random order."""
    decoding, tokenizer = shape.decoding, tokenizer_of_one_word()
    prompts, rng = Prompts(shape.model["vocab_size"]), random.Random(0)
    speeds: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as ends:
        sides = [
            Side(name, ends.enter_context(closing(LLM(model, shape.tiers(pools), tokenizer))), name == ON_EVICT)
            for name, pools in _pools(decoding).items()
        ]
        for side in sides:
            wait_pinned(side.llm, clock)
        took_s = 0.0
        for round_id in range(decoding.rounds + 1):  # the first one fills the pools, and does not count
            if round_id > 1 and clock.left < took_s:
                break
            started = time.monotonic()
            if round_id:
                _round(sides, decoding, prompts, rng, speeds)
            else:
                _round(sides, replace(decoding, turns=1), prompts, rng, defaultdict(list))
                for side in sides:
                    side.decoding = side.prefilling = Spilled()
            took_s = time.monotonic() - started
            clock.note(f"decoding, round {round_id} of at most {decoding.rounds}: {took_s:.1f} s")
        rows = decoding_rows(speeds, {side.name: (side.decoding, side.prefilling) for side in sides})
        del sides
    free_memory()
    return rows


def _pools(decoding: Decoding) -> dict[str, Pools]:
    return {
        NO_SPILL: replace(decoding.pools, host=0),
        CLEAN_AHEAD: decoding.pools,
        ON_EVICT: decoding.pools,
    }


def _round(
    sides: Sequence[Side],
    decoding: Decoding,
    prompts: Prompts,
    rng: random.Random,
    speeds: dict[str, list[float]],
) -> None:
    # The first request decodes until the prompt of the last is computed: about one step for each request.
    max_tokens = 2 * decoding.num_requests + decoding.steps * decoding.turns + 1
    for side in rng.sample(list(sides), len(sides)):
        side.prefill([prompts.new(decoding.context) for _ in range(decoding.num_requests)], max_tokens)
    for _ in range(decoding.turns):
        for side in rng.sample(list(sides), len(sides)):
            speeds[side.name].append(side.decode(decoding.steps))
    for side in sides:
        side.end()


def decoding_rows(speeds: dict[str, list[float]], spilled: dict[str, tuple[Spilled, Spilled]]) -> list[Row]:
    """Rows of tokens a second, ratios of turns that follow each other, and *spilled* while decoding and prefilling."""
    rows = [
        Row(f"decode, {name}", statistics.median(speeds[name]), "tokens/s")
        for name in (NO_SPILL, CLEAN_AHEAD, ON_EVICT)
    ]
    for name, minimum in ((CLEAN_AHEAD, MIN), (ON_EVICT, None)):
        ratios = [ours / plain for ours, plain in zip(speeds[name], speeds[NO_SPILL], strict=True)]
        rows.append(at_least(f"decode, {name} / {NO_SPILL}", statistics.median(ratios), minimum))
        if len(ratios) >= ENOUGH:
            rows.append(Row("  spread of that", spread(ratios), "%"))
    for name in (CLEAN_AHEAD, ON_EVICT):
        decoding, prefilling = spilled[name]
        rows.append(
            Row(f"{name}: blocks pushed out while decoding", decoding.evicted, "", ">= 1", decoding.evicted > 0)
        )
        rows.append(Row(f"{name}: copied down while decoding", decoding.num_bytes / 1e6, "MB"))
        for what, dropped in (("decoding", decoding.dropped), ("prefilling", prefilling.dropped)):
            promise = ("0", dropped == 0) if name == CLEAN_AHEAD else ("", None)
            rows.append(Row(f"{name}: dropped spills while {what}", dropped, "", *promise))
    return rows
