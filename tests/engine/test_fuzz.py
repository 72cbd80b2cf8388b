"""Random requests to a whole engine in a world of mishaps: no wrong token, no lease that stays, no endless wait."""

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fuzzed_engine import NUM_NEW, Asked, FuzzedEngine, Tally
from lora_adapters import ADAPTERS, plain_adapted, save_adapter
from small_models import COMMON, plain_greedy
from state_models import build_states
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

SMALL = {**COMMON, "num_hidden_layers": 2, "initializer_range": 0.2}
HYBRID = ["sliding_attention", "full_attention"]
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, sliding_window=20, layer_types=HYBRID)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=20)),
}
STATES = ["FalconH1", "LaraMini", "Lfm2", "Mamba2", "Qwen3_5Text"]
CHOICES = ["llama", "llama", "gemma3", "mistral", *STATES]
NUM_STEPS = 60
NUM_STEPS_LONG = 200
LORA = "all"


def seeds(count: int) -> list[int]:
    """Fresh seeds for each run; KVTIER_SEED repeats one, KVTIER_RUNS is their number in the long form."""
    if "KVTIER_SEED" in os.environ:
        return [int(os.environ["KVTIER_SEED"])]
    return [random.SystemRandom().randrange(1 << 30) for _ in range(count)]


def build(name: str) -> PreTrainedModel:
    """The model of that name, with the same weights every time."""
    torch.manual_seed(7)
    return build_states(name) if name in STATES else MODELS[name]().eval()


class Plain:
    """The models, and the answers of plain transformers and peft, computed once for each prompt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[tuple[str, str | None], PreTrainedModel] = {}
        self._answers: dict[tuple[str, str | None, tuple[int, ...]], list[int]] = {}
        self._adapters: dict[str, dict[str, Path]] = {}

    def model(self, name: str, lora: str | None = None) -> PreTrainedModel:
        """The model with one adapter or none."""
        if (name, lora) not in self._models:
            base = build(name)
            self._models[name, lora] = base if lora is None else plain_adapted(base, self.adapters(name)[lora])
        return self._models[name, lora]

    def adapters(self, name: str) -> dict[str, Path]:
        """The folders of the model's adapters."""
        if name not in self._adapters:
            folder = save_adapter(build(name), self.folder / f"{name}-{LORA}", **ADAPTERS[LORA])
            self._adapters[name] = {LORA: folder}
        return self._adapters[name]

    def answer(self, name: str, lora: str | None, prompt: Sequence[int]) -> list[int]:
        """The first tokens after the prompt."""
        key = name, lora, tuple(prompt)
        if key not in self._answers:
            self._answers[key] = plain_greedy(self.model(name, lora), list(prompt), NUM_NEW)
        return self._answers[key]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(tmp_path_factory.mktemp("fuzz"))


def run(plain: Plain, seed: int, num_steps: int) -> Tally:
    """One run, then a start on its store if it has one; the mishaps that it met."""
    rng = random.Random(seed)
    name = rng.choice(CHOICES)
    # An adapter cannot change what mixers compute, because they see each request's rows alone.
    adapters = plain.adapters(name) if rng.random() < 0.2 and name not in STATES else {}
    with pytest.MonkeyPatch.context() as patch:
        engine = FuzzedEngine(plain.model(name), seed, plain.folder / "store", patch, adapters)
        try:
            engine.run(num_steps)
            if engine.store is not None:
                engine.flush()
                engine.restart()
                for _ in range(5):
                    engine.ask()
                engine.run(0)
        finally:
            engine.close()
    for asked, is_answered in engine.answers():
        check_tokens(asked, is_answered, plain.answer(name, asked.lora, asked.request.prompt_token_ids))
    return engine.tally


def check_tokens(asked: Asked, is_answered: bool, expected: list[int]) -> None:
    """Assert that the request's tokens begin the expected ones, and are complete unless it was aborted."""
    generated = asked.request.generated
    assert generated == expected[: len(generated)], f"wrong tokens of {asked.request.tokens}"
    assert len(generated) == asked.request.sampling.max_tokens or not is_answered


def run_all(plain: Plain, all_seeds: Sequence[int], num_steps: int) -> Tally:
    tally = Tally()
    for seed in all_seeds:
        print(f"KVTIER_SEED={seed}")
        tally.plus(run(plain, seed, num_steps))
    print(tally)
    return tally


@pytest.mark.long
def test_no_wrong_token_no_lease_left_and_no_endless_wait_in_a_few_runs(plain: Plain) -> None:
    all_seeds = seeds(10)

    tally = run_all(plain, all_seeds, NUM_STEPS)

    assert tally.num_answers > 2 * len(all_seeds), "hardly anything was asked: this shows nothing"


@pytest.mark.slow
def test_no_wrong_token_no_lease_left_and_no_endless_wait_in_hundreds_of_runs(plain: Plain) -> None:
    all_seeds = seeds(int(os.environ.get("KVTIER_RUNS", "200")))

    tally = run_all(plain, all_seeds, NUM_STEPS_LONG)

    if len(all_seeds) >= 50:
        met = {**tally.tokens, "hung": tally.num_hung, "late": tally.num_late, "corrupt": tally.num_corrupt}
        met |= {"failed": tally.num_failed, "layers missed": tally.num_missed_layers, "aborted": tally.num_aborted}
        assert all(met.values()), f"the runs have not met everything: {met}"
