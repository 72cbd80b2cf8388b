"""What does vLLM answer from a disk below its own offloading once bytes there are damaged?"""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

from foreign.offloading import fs_tier, kvtier_tier, offloading_vllm
from foreign.running import Vllm, make_model

from bench.connectors.connector_bed import Prompts
from bench.connectors.damaged_stores import FAULTS, QUICK_FAULTS, FilePerBlock, OurStore, Store
from bench.report import Effort, Row
from bench.rounds import at_least, never

BLOCK = 128  # tokens; 512 KiB
PROMPT_TOKENS = 8 * BLOCK + 2
NUM_OTHERS = 12  # prompts that fill the store after the first
CAPACITY = "24MiB"  # holds the first prompt, and not the others too
NUM_TOKENS = 16
OURS = "kvtier"

TIERS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "fs": fs_tier,
    OURS: lambda folder: kvtier_tier(folder, CAPACITY),
}
"""What `secondary_tiers` has for a store in a folder."""


@dataclass(frozen=True)
class Answered:
    """vLLM's answer to the first prompt after a fault."""

    computed: int  # tokens of the prompt
    is_wrong: bool  # it is another one than without a cache
    counted: int  # blocks that the store says were damaged

    @property
    def has_used_damage(self) -> bool:
        """Whether what was damaged was loaded: all blocks of the prompt were."""
        return self.computed == PROMPT_TOKENS % BLOCK


def vllm_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """The same prompt after each fault: theirs as seen; ours computed again and right, and the fault counted."""
    rows: list[Row] = []
    for name in effort.of(tuple(TIERS), quick=(OURS,)):
        for fault, seen in _answers(effort, python, name, folder / f"vLLM {name}").items():
            print(f"vLLM on {name}, {fault}: {seen}", file=sys.stderr)
            rows += _rows(f"{fault}: vLLM on {name}", seen, name == OURS)
    return rows


def _rows(name: str, seen: Answered, is_ours: bool) -> list[Row]:
    rows = [Row(f"{name}: tokens of {PROMPT_TOKENS} computed", seen.computed, "")]
    bad = {"damaged bytes used": seen.has_used_damage, "wrong answers": seen.is_wrong}
    if not is_ours:
        return rows + [Row(f"{name}: {what}", num, "") for what, num in bad.items()]
    rows += [never(f"{name}: {what}", num) for what, num in bad.items()]
    return [*rows, at_least(f"{name}: faults counted", seen.counted, 1, varies=False)]


def _answers(effort: Effort, python: str, name: str, folder: Path) -> dict[str, Answered]:
    """What vLLM answers after each fault, each time from the same store in the same place."""
    folder.mkdir()
    model, prompts, place = make_model(python, folder), Prompts(PROMPT_TOKENS), folder / "store"
    store: Store = OurStore(place) if name == OURS else FilePerBlock(place)

    def started() -> AbstractContextManager[Vllm]:
        return offloading_vllm(python, model, [TIERS[name](place)])

    first = prompts.next()
    with started() as engine:
        right = engine.generate([first], NUM_TOKENS)["tokens"]
        engine.settle()
    copytree(place, folder / "as stored")
    answers = {}
    for fault, damage in effort.of(FAULTS, quick=QUICK_FAULTS).items():
        rmtree(place)
        copytree(folder / "as stored", place)
        if damage == "put_index_back":
            store.keep_index()
            with started() as engine:
                for _ in range(NUM_OTHERS):
                    engine.generate([prompts.next()])
                engine.settle()
        getattr(store, damage)()
        with started() as engine:
            answer = engine.generate([first], NUM_TOKENS)
            engine.step()  # vLLM tells its metrics with steps
            answers[fault] = Answered(answer["scheduled"], answer["tokens"] != right, _counted(engine))
    return answers


def _counted(engine: Vllm) -> int:
    """Blocks whose bytes were not what they were, as KVTier says; 0 for another."""
    return engine.counts("kvtier_tier_").get("corrupt_blocks", 0)
