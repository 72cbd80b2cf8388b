"""Latent attention: rows are kept; keys and values are expanded from them, or queries absorbed, with equal logits."""

import random
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_adapters import save_adapter
from small_models import VOCAB, build
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from kvtier.engine.model import latent_attention
from kvtier.engine.model.adapter_folder import UnusableLora
from kvtier.engine.model.attention import Step
from kvtier.engine.model.errors import UnsupportedModel
from kvtier.engine.model.latent_attention import (
    LatentPaths,
    Matrices,
    attend_absorbed,
    attend_latent,
    latent_paths,
)
from kvtier.engine.model.lora_adapter import load_adapter
from kvtier.engine.model.paged_gather import Scoring
from kvtier.engine.model.paged_segment import Segment, segment
from kvtier.engine.model.runner import Chunk, ModelRunner
from kvtier.tiers.naming.groups import FullAttention

BLOCK_SIZE = 16


def worst_of_two(model: PreTrainedModel) -> float:
    """Return the largest error of two requests that share steps, as a fraction of the largest logit."""
    prompts = [random.Random(seed).choices(range(VOCAB), k=230) for seed in range(2)]
    with torch.inference_mode():
        plain = [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
    runner = ModelRunner(model, BLOCK_SIZE, 1 << 20)
    slots = random.Random(5).sample(range(runner.num_slots), 30)
    tables = [[slots[:15]], [slots[15:]]]
    starts, worst = [0, 0], 0.0
    for counts in ((70, 40), (1, 100), (90, 1), (5, 60), (1, 1), (63, 28)):
        chunks = [Chunk(prompts[i][starts[i] : starts[i] + counts[i]], starts[i], tables[i]) for i in range(2)]
        for i, row in enumerate(runner.run(chunks)):
            starts[i] += counts[i]
            expected = plain[i][starts[i] - 1]
            worst = max(worst, float((row - expected).abs().max() / expected.abs().max()))
    return worst


def part(start: int, num_tokens: int, first_row: int = 0) -> Segment:
    table = list(range(-(-(start + num_tokens) // BLOCK_SIZE)))
    rows = slice(first_row, first_row + num_tokens)
    return segment(FullAttention(BLOCK_SIZE), table, rows, start, num_tokens, torch.device("cpu"))


@pytest.mark.parametrize(
    ("absorbed_queries", "expanded_keys"),
    [(16, 16_384), (0, 16_384), (1000, 16_384), (16, 0), (16, 100)],
    ids=["as it is", "all expanded", "all absorbed", "no room to expand", "room for one of two"],
)
def test_both_ways_give_the_logits_of_plain_transformers(
    absorbed_queries: int, expanded_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_attention, "ABSORBED_QUERIES", absorbed_queries)
    monkeypatch.setattr(latent_attention, "EXPANDED_KEYS", expanded_keys)

    assert worst_of_two(build("deepseek_v3", spread=0.1)) <= 2e-5


def test_scores_in_several_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_attention, "ABSORBED_QUERIES", 1000)
    monkeypatch.setattr(latent_attention, "MAX_SCORES", 3000)

    assert worst_of_two(build("deepseek_v3", spread=0.1)) <= 2e-5


@pytest.mark.parametrize("num_chosen", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_has_the_same_bytes_alone_and_beside_others(dtype: torch.dtype, num_chosen: int | None) -> None:
    torch.manual_seed(5)
    lengths = [40, 1, 300, 77, 16, 17, 130, 64, 200, 33, 5]
    matrices = Matrices(torch.randn(16, 64, 24).to(dtype), torch.randn(16, 64, 32).to(dtype))
    kept, query = torch.randn(120, BLOCK_SIZE, 72).to(dtype), torch.randn(1, 16, len(lengths), 32).to(dtype)
    chosen = None if num_chosen is None else torch.stack([torch.randperm(max(20, each))[:20] for each in lengths])
    first, parts = 0, []
    for row, length in enumerate(lengths):
        table = list(range(first, first := first + -(-length // BLOCK_SIZE)))
        parts.append(segment(FullAttention(BLOCK_SIZE), table, slice(row, row + 1), length - 1, 1, torch.device("cpu")))

    def attended(some: list[Segment]) -> torch.Tensor:
        output = torch.zeros(len(lengths), 16, 32, dtype=dtype)
        paths = LatentPaths((), tuple(some), reads_earlier=False)
        attend_latent(query, query, query, kept, paths, matrices, Scoring(0.2), output, chosen)
        return output

    together = attended(parts)

    assert len(parts) > latent_attention.DECODES
    for row, each in enumerate(parts):
        of_part = None if chosen is None or lengths[row] <= 20 else chosen[row : row + 1]
        expected = attend_absorbed(query[0, :, row : row + 1], kept, matrices, each, Scoring(0.2), of_part)[:, 0]
        assert torch.equal(attended([each])[row], together[row])
        assert torch.allclose(
            together[row].float(), expected.float(), rtol=2e-2, atol=1e-4 if dtype is torch.float32 else 0.5
        )


def test_an_expansion_that_is_no_matrix_is_never_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    expand = DeepseekV3Attention.expand_kv

    def expand_bent(self: DeepseekV3Attention, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Any:
        keys, values = expand(self, torch.tanh(kv_nope), k_rot)
        return keys, values + 0.1

    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", expand_bent)

    assert worst_of_two(build("deepseek_v3", spread=0.1)) <= 2e-5


def test_an_expansion_that_fails_leaves_the_model_its_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("deepseek_v3")
    before = model.config._attn_implementation

    expand = DeepseekV3Attention.expand_kv

    def fail(self: DeepseekV3Attention, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Any:
        if kv_nope.shape[2] > 2:  # after the look at the model, which has two tokens
            raise MemoryError
        return expand(self, kv_nope, k_rot)

    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", fail)

    with pytest.raises(MemoryError):
        ModelRunner(model, BLOCK_SIZE, 1 << 20)

    assert model.config._attn_implementation == before


def test_a_latent_layer_that_caps_its_scores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeepseekV3Attention, "forward", partialmethod(_forward_capped, DeepseekV3Attention.forward))

    with pytest.raises(UnsupportedModel, match="it has latent attention and caps its scores"):
        ModelRunner(build("deepseek_v3"), BLOCK_SIZE, 1 << 20)


def _forward_capped(self: DeepseekV3Attention, forward: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(self, *args, **kwargs, softcap=30.0)


def test_rows_of_a_layer_that_is_not_known_are_not_written() -> None:
    first, second = torch.ones(1, 1, 2, 48), torch.ones(1, 1, 2, 16)

    assert Step((), {}).receive(first, second, 7) == (first, second)


def test_long_chunks_are_expanded_and_single_tokens_absorbed() -> None:
    alone, decode, chunk = part(0, 40), part(70, 1, 40), part(96, 50, 41)

    paths = latent_paths([alone, decode, chunk], can_absorb=True)

    assert paths.absorbed == (decode,)
    assert paths.expanded == ((alone, slice(0, 40)), (chunk, slice(40, 40 + 146)))
    assert paths.reads_earlier
    assert not latent_paths([alone, decode], can_absorb=True).reads_earlier
    assert latent_paths([decode], can_absorb=False).expanded == ((decode, slice(0, 71)),)


def test_a_token_takes_a_row_of_latents_and_one_rotated_key() -> None:
    runner = ModelRunner(build("deepseek_v3"), BLOCK_SIZE, 1 << 20)

    assert [group.parts for group in runner.geometry] == [((1, 48 + 16),)]
    assert runner.block_bytes == (4 * BLOCK_SIZE * 64 * 4,)


def test_an_adapter_of_a_layer_that_expands_rows_is_refused(tmp_path: Path) -> None:
    folder = save_adapter(build("deepseek_v3"), tmp_path / "adapter", target_modules=["kv_b_proj"], r=2)
    model = build("deepseek_v3")
    adapter = load_adapter(model, "ann", folder)

    with pytest.raises(UnusableLora, match="kv_b_proj expands latent rows"):
        ModelRunner(model, BLOCK_SIZE, 1 << 20, [adapter])
