"""What does the real vLLM get: after a reset, after restarts of the engine, of the sidecar and of both, and when bytes
in host memory or on disk are damaged?"""

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreign.running import Sidecar, free_endpoint, make_model
from foreign.unchecked import UNCHECKED

from bench.report import Effort, Row
from bench.sidecar.vllm_bed import CHUNK_TOKENS, HOST, PROMPT_TOKENS, Bed, started_sidecar


@dataclass
class Seen:
    """What became of prompts that were asked for a second time."""

    equal: list[bool] = field(default_factory=list)
    scheduled: list[int] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)

    def rows(self, name: str) -> list[Row]:
        """What is stored is loaded, and the first token comes sooner."""
        ratio = statistics.median(a / c for a, c in zip(self.again_s, self.cold_s, strict=True))
        limit = CHUNK_TOKENS + PROMPT_TOKENS % CHUNK_TOKENS
        return [
            Row(f"{name}: outputs equal", min(self.equal), "", "1", all(self.equal)),
            Row(
                f"{name}: tokens scheduled", max(self.scheduled), "tokens", f"<= {limit}", max(self.scheduled) <= limit
            ),
            Row(f"{name}: TTFT of cold", ratio, "", "<= 0.25", ratio <= 0.25, varies=True),
            Row(f"{name}: TTFT", 1e3 * statistics.median(self.again_s), "ms"),
        ]

    def repaired_rows(self, name: str) -> list[Row]:
        """Return the rows of prompts with damaged blocks in host memory, which must be loaded from disk."""
        limit = CHUNK_TOKENS + PROMPT_TOKENS % CHUNK_TOKENS
        return [
            Row(f"{name}: outputs equal", min(self.equal), "", "1", all(self.equal)),
            Row(
                f"{name}: tokens scheduled", max(self.scheduled), "tokens", f"<= {limit}", max(self.scheduled) <= limit
            ),
        ]

    def damaged_rows(self, name: str) -> list[Row]:
        """Return the rows of prompts with damaged blocks in every tier, which must be computed again."""
        minimum = min(self.scheduled)
        return [
            Row(f"{name}: outputs equal", min(self.equal), "", "1", all(self.equal)),
            Row(f"{name}: tokens scheduled", minimum, "tokens", f"{PROMPT_TOKENS}", minimum == PROMPT_TOKENS),
        ]


def ask_twice(bed: Bed, num_prompts: int, between: Callable[[], None]) -> Seen:
    """Ask prompts cold, and again after *between*, which comes once for all of them."""
    prompts, seen = [bed.prompt() for _ in range(num_prompts)], Seen()
    cold = [bed.engine.generate([prompt]) for prompt in prompts]
    between()
    for prompt, first in zip(prompts, cold, strict=True):
        again: Any = bed.engine.generate([prompt])
        seen.equal.append(again["tokens"] == first["tokens"])
        seen.scheduled.append(again["scheduled"])
        seen.cold_s += first["ttft_s"]
        seen.again_s += again["ttft_s"]
    return seen


def one_after_the_other(*deeds: Callable[[], object]) -> Callable[[], None]:
    """All of the deeds as one."""

    def do() -> None:
        for deed in deeds:
            deed()

    return do


def vllm_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """The real vLLM, attached by configuration."""
    rows, num_prompts = list[Row](), effort.of(3, quick=1)
    model = make_model(python, folder)
    with ExitStack() as stack:
        store = folder / "store"
        bed = Bed(python, model, started_sidecar(store))
        stack.callback(bed.close)
        forget, restart = bed.reset_engine, bed.restart_engine
        rows += ask_twice(bed, num_prompts, forget).rows("reset")
        rows += ask_twice(bed, num_prompts, restart).rows("engine restarted")
        rows += ask_twice(bed, num_prompts, one_after_the_other(bed.restart_sidecar, forget)).rows("sidecar restarted")
        both = one_after_the_other(bed.sidecar.stop, bed.sidecar.start, restart)
        rows += ask_twice(bed, num_prompts, both).rows("both restarted")
        flipped = one_after_the_other(forget, bed.flip_host_memory)
        rows += ask_twice(bed, num_prompts, flipped).repaired_rows("bytes flipped in host memory")
        flipped = one_after_the_other(forget, lambda: bed.flip_disk(store), forget)
        rows += ask_twice(bed, num_prompts, flipped).damaged_rows("bytes flipped on disk")
    with ExitStack() as stack:
        bed = Bed(python, model, Sidecar(free_endpoint(), "--host", HOST))
        stack.callback(bed.close)
        flipped = one_after_the_other(bed.reset_engine, bed.flip_host_memory)
        rows += ask_twice(bed, num_prompts, flipped).damaged_rows("bytes flipped in host memory, without a disk")
    with ExitStack() as stack:
        bed = Bed(python, model, started_sidecar(folder / "unchecked", UNCHECKED))
        stack.callback(bed.close)
        seen = ask_twice(bed, num_prompts, one_after_the_other(bed.reset_engine, bed.flip_host_memory))
        differ = not any(seen.equal)
        rows.append(Row("control, no check of digests: outputs differ", differ, "", "1", differ))
    return rows
