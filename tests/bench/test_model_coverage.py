"""The coverage of models finds wrong tokens, prefixes from another tier, and answers that prove nothing."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_sidecar import started_sidecar
from family_coverage import BATCH, GREEDY, NUM_TOKENS, Answer, Outcome, Way, cover, is_insensitive, judge, prompt_of
from small_models import byte_tokenizer
from tiny_families import NotBuilt, reads_later_tokens, tiny_model
from transformers import PreTrainedModel

from kvtier import LLM, Completion
from kvtier.engine.model.runner import Chunk, ModelRunner
from kvtier.tiers.lower.statistics import TokenBalance

ROOT = Path(__file__).resolve().parents[2]
DEVICE = {"device": {"capacity": "4MiB", "block_size": 16}, "host": {"capacity": 0}}


def answer_of(model: PreTrainedModel, prompt: list[int]) -> Completion:
    with LLM(model, DEVICE, byte_tokenizer()) as llm:
        return llm.generate(prompt, GREEDY)[0]


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def done(llama: PreTrainedModel) -> Completion:
    return answer_of(llama, prompt_of(0, NUM_TOKENS))


def test_the_engines_answer_is_the_models_own(llama: PreTrainedModel, done: Completion) -> None:
    judged = judge(llama, prompt_of(0, NUM_TOKENS), done)

    assert (judged.fault, judged.num_ties) == ("", 0)
    assert judged.error <= 1e-4


def test_another_token_is_a_fault(llama: PreTrainedModel, done: Completion) -> None:
    tokens = list(done.token_ids)
    other = replace(done, token_ids=[*tokens[:2], (tokens[2] + 1) % 256, *tokens[3:]])

    assert judge(llama, prompt_of(0, NUM_TOKENS), other).fault == f"token 3 is {other.token_ids[2]}, not {tokens[2]}"


def test_another_log_probability_is_a_fault(llama: PreTrainedModel, done: Completion) -> None:
    first, *rest = done.logprobs
    other = replace(done, logprobs=[replace(first, logprob=first.logprob - 0.1), *rest])

    assert "log probabilities differ by" in judge(llama, prompt_of(0, NUM_TOKENS), other).fault


def test_the_answer_after_one_other_token_of_the_prompt_is_a_fault(llama: PreTrainedModel, done: Completion) -> None:
    prompt = prompt_of(0, NUM_TOKENS)
    prompt[NUM_TOKENS // 2] = (prompt[NUM_TOKENS // 2] + 1) % 256

    assert judge(llama, prompt, done).fault != ""


def test_an_answer_that_depends_on_the_last_tokens_alone_proves_nothing(llama: PreTrainedModel) -> None:
    blind = tiny_model("llama")
    with torch.no_grad():
        for layer in blind.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    prompt = prompt_of(0, NUM_TOKENS)

    assert is_insensitive(blind, Answer(Way.COLD, prompt, answer_of(blind, prompt)))
    assert not is_insensitive(llama, Answer(Way.COLD, prompt, answer_of(llama, prompt)))


@pytest.mark.parametrize(
    ("balance", "tiers", "is_fault"),
    [
        (TokenBalance(recomputed=180), [], False),
        (TokenBalance(device=176, recomputed=4), [], True),
        (TokenBalance(host=176, recomputed=4), ["host"], False),
        (TokenBalance(device=96, host=80, recomputed=4), ["host"], False),  # the window was in host memory only
        (TokenBalance(device=176, recomputed=4), ["host"], True),
        (TokenBalance(host=16, recomputed=164), ["host"], True),
        (TokenBalance(recomputed=180), ["host", "disk"], True),
        (TokenBalance(disk=176, recomputed=4), ["host", "disk"], False),
    ],
)
def test_a_prefix_from_another_tier_is_a_fault(
    done: Completion, balance: TokenBalance, tiers: Sequence[str], is_fault: bool
) -> None:
    answer = Answer(Way.HOST, prompt_of(0, NUM_TOKENS), replace(done, tokens=balance), tiers)

    assert (answer.fault() != "") is is_fault


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("sidecar")
    with started_sidecar(folder, str(folder / "own.sock")):
        yield f"unix://{folder / 'own.sock'}"


@pytest.mark.long
def test_a_block_in_place_of_another_is_found_in_every_way_that_has_a_cached_prefix(
    monkeypatch: pytest.MonkeyPatch, sidecar: str, tmp_path: Path
) -> None:
    run = ModelRunner.run

    def run_with_another_block(self: ModelRunner, chunks: Sequence[Chunk]) -> torch.Tensor:
        return run(self, [with_another_block(chunk) if chunk.start in hits else chunk for chunk in chunks])

    def with_another_block(chunk: Chunk) -> Chunk:
        return replace(chunk, tables=[[table[1], *table[1:]] for table in chunk.tables])

    hits = {NUM_TOKENS // 16 * 16, NUM_TOKENS - 1}  # where the first chunk after a hit begins
    monkeypatch.setattr(ModelRunner, "run", run_with_another_block)

    coverage = cover("llama", tmp_path, sidecar)

    assert coverage.outcome is Outcome.WRONG
    assert set(coverage.faults) >= {Way.DEVICE, Way.HOST, Way.DISK, Way.RESTART, Way.SIDECAR, Way.BATCHED}
    assert Way.COLD not in coverage.faults


def test_the_first_prompt_reaches_beyond_the_windows_of_all_layers() -> None:
    config = tiny_model("mistral").config

    assert max(BATCH) == NUM_TOKENS > config.num_hidden_layers * config.sliding_window


def test_encoders_are_those_whose_tokens_change_the_logits_before_them() -> None:
    assert reads_later_tokens("bert")
    assert not reads_later_tokens("llama")
    assert not reads_later_tokens("mamba2")


def test_a_type_that_transformers_cannot_build_is_told_with_the_reason() -> None:
    with pytest.raises(NotBuilt, match="'MusicgenConfig' object has no attribute"):
        tiny_model("musicgen")


@pytest.mark.long
def test_a_run_of_the_command_examines_what_it_is_asked_for() -> None:
    command = [sys.executable, "-m", "bench.engine.model_coverage", "--workers", "1", "--family", "doge"]
    done = subprocess.run([*command, "--family", "bloom"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "1/2 doge: refused layer 0 creates an attention mask of its own" in done.stderr
    assert "2/2 bloom: refused 0 of its 4 layers call" in done.stderr
