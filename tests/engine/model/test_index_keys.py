"""Index keys: layers that choose the keys that they read, with the logits of plain transformers."""

import random
from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from equal_answers import GREEDY, NUM_NEW, configuration, prompt_of, push_down
from lora_adapters import save_adapter
from small_models import COMMON, VOCAB, build, byte_tokenizer, plain_greedy
from transformers import (
    AutoModelForCausalLM,
    AXK2Config,
    AXK2ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    HYV4Config,
    HYV4ForCausalLM,
    MistralLarge4Config,
    MistralLarge4ForConditionalGeneration,
    MistralLarge4TextConfig,
    PreTrainedModel,
)
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention

from kvtier import LLM
from kvtier.engine.model import index_keys, latent_attention
from kvtier.engine.model.adapter_folder import UnusableLora
from kvtier.engine.model.attention import Step
from kvtier.engine.model.digest import weights_digest
from kvtier.engine.model.errors import UnsupportedModel
from kvtier.engine.model.index_keys import LATER, IndexCall, IndexStep, index_calls
from kvtier.engine.model.layers import observe_layers
from kvtier.engine.model.lora_adapter import load_adapter
from kvtier.engine.model.paged_segment import Segment, segment
from kvtier.engine.model.runner import Chunk, ModelRunner
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.tier import Tier

BLOCK_SIZE = 16
TOP_K = 24
STEPS = ((70, 40, 10), (1, 100, 30), (90, 1, 1), (5, 60, 1), (1, 1, 100), (63, 28, 88))  # of three requests each
SHAPE = {
    **COMMON,
    "num_key_value_heads": 4,
    "head_dim": 8,  # of the rotated part
    "initializer_range": 0.1,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "index_topk": TOP_K,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
SHARED = {"index_topk_freq": 2, "index_skip_topk_offset": 1}
FAMILIES = {
    "AXK2": lambda: AXK2ForCausalLM(AXK2Config(**SHAPE)),
    "DeepSeek V3.2": lambda: build("deepseek_v32", spread=0.1),
    # every second layer reads the keys that the layer before it chose, and has no index keys
    "GLM-DSA": lambda: GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**SHAPE, **SHARED)),
    "HY-V4": lambda: HYV4ForCausalLM(HYV4Config(**SHAPE)),  # has attention sinks
}


def build_family(family: str) -> PreTrainedModel:
    torch.manual_seed(7)
    return FAMILIES[family]().eval()


def plain_logits(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    return logits


def worst_of_three(model: PreTrainedModel) -> float:
    """Return the largest error of three requests that share steps, as a fraction of the largest logit."""
    prompts = [random.Random(seed).choices(range(VOCAB), k=230) for seed in range(3)]
    plain = [plain_logits(model, prompt) for prompt in prompts]
    runner = ModelRunner(model, BLOCK_SIZE, 4 << 20)
    slots = random.Random(5).sample(range(runner.num_slots), 45)
    tables = [[slots[15 * i : 15 * i + 15]] * len(runner.groups) for i in range(3)]
    starts, worst = [0, 0, 0], 0.0
    for counts in STEPS:
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        chunks = [Chunk(prompts[i][starts[i] : ends[i]], starts[i], tables[i]) for i in range(3)]
        for i, row in enumerate(runner.run(chunks)):
            expected = plain[i][ends[i] - 1]
            worst = max(worst, float((row - expected).abs().max() / expected.abs().max()))
        starts = ends
    return worst


def part(start: int, num_tokens: int, first_row: int = 0) -> Segment:
    table = list(range(-(-(start + num_tokens) // BLOCK_SIZE)))
    rows = slice(first_row, first_row + num_tokens)
    return segment(FullAttention(BLOCK_SIZE), table, rows, start, num_tokens, torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_three_requests_in_a_step_get_the_logits_of_plain_transformers(family: str) -> None:
    assert worst_of_three(build_family(family)) <= 2e-5


def mistral_large(**more: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    text = MistralLarge4TextConfig(**{**SHAPE, **SHARED, "no_rope_layers": [1, 1, 0, 1], **more})
    vision = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "head_dim": 16, "patch_size": 14, "image_size": 28}
    model: PreTrainedModel = MistralLarge4ForConditionalGeneration(
        MistralLarge4Config(text_config=text, vision_config=vision)
    ).eval()
    return model


def test_a_model_that_also_sees_images_gets_the_logits_of_plain_transformers_for_text() -> None:
    assert worst_of_three(mistral_large()) <= 2e-5


def test_a_layer_that_reads_the_latent_rows_of_another_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="layer 3 chooses the keys that it reads, and keeps no latent rows"):
        ModelRunner(mistral_large(kv_source_layers=[0, 1, 2, 1]), BLOCK_SIZE, 1 << 20)


@pytest.mark.parametrize("family", ["GLM-DSA", "HY-V4"])
@pytest.mark.parametrize(
    ("max_pairs", "absorbed_queries", "max_scores"),
    [(2000, 16, 1 << 26), (1, 16, 1 << 26), (1 << 20, 0, 1 << 26), (1 << 20, 1000, 1 << 26), (1 << 20, 1000, 3000)],
    ids=["long chunks in calls of their own", "calls of one token", "all expanded", "all absorbed", "in parts"],
)
def test_every_way_through_a_step_gives_the_logits_of_plain_transformers(
    family: str, max_pairs: int, absorbed_queries: int, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_keys, "MAX_PAIRS", max_pairs)
    monkeypatch.setattr(latent_attention, "ABSORBED_QUERIES", absorbed_queries)
    monkeypatch.setattr(latent_attention, "MAX_SCORES", max_scores)

    assert worst_of_three(build_family(family)) <= 2e-5


def test_tokens_are_the_same_cold_and_from_every_tier_if_some_rows_have_no_index_key(tmp_path: Path) -> None:
    """Slots that hold nothing are NaN, so that a row of another pool, or one not yet loaded, gives other tokens."""
    torch.manual_seed(7)
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**{**SHAPE, **SHARED, "initializer_range": 0.2})).eval()
    prompt = prompt_of(1)
    expected = plain_greedy(model, prompt, NUM_NEW)
    config = configuration(tmp_path, prompts_on_device=1.5, prompts_in_host=3.0, bytes_per_token=4 * (2 * 64 + 2 * 32))
    config["device"]["poison"] = True

    with LLM(model, config, byte_tokenizer()) as llm:
        cold = llm.generate(prompt, GREEDY)[0]
        push_down(llm, prompt, Tier.DEVICE)
        from_host = llm.generate(prompt, GREEDY)[0]
        push_down(llm, prompt, Tier.HOST)
        from_disk = llm.generate(prompt, GREEDY)[0]
        llm.check()
    with LLM(model, config, byte_tokenizer()) as llm:
        restarted = llm.generate(prompt, GREEDY)[0]

    assert [done.token_ids for done in (cold, from_host, from_disk, restarted)] == [expected] * 4
    assert from_host.tokens.host > 0
    assert from_disk.tokens.disk > 0
    assert restarted.tokens.disk > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_these_models_do_not_read_all_keys(family: str) -> None:
    model, prompt = build_family(family), random.Random(0).choices(range(VOCAB), k=230)
    chosen = plain_logits(model, prompt)
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 4096

    assert float((plain_logits(model, prompt) - chosen).abs().max() / chosen.abs().max()) > 0.01


def test_a_row_ends_with_the_index_key_of_a_layer_that_has_an_indexer() -> None:
    alone = ModelRunner(build_family("DeepSeek V3.2"), BLOCK_SIZE, 1 << 20)
    mixed = ModelRunner(build_family("GLM-DSA"), BLOCK_SIZE, 1 << 20)

    assert [(group.layer_ids, group.parts) for group in alone.geometry] == [((0, 1, 2, 3), ((1, 24 + 8 + 32),))]
    assert [(group.layer_ids, group.parts) for group in mixed.geometry] == [
        ((0, 2), ((1, 24 + 8 + 32),)),
        ((1, 3), ((1, 24 + 8),)),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_without_weights_finds_the_same_rows(family: str) -> None:
    model = build_family(family)
    with torch.device("meta"):
        planned = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)

    assert observe_layers(planned, BLOCK_SIZE).attention == observe_layers(model, BLOCK_SIZE).attention


def test_a_call_takes_short_requests_together_and_cuts_long_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_keys, "MAX_PAIRS", 1000)

    calls = index_calls([part(100, 1), part(200, 1, 1), part(0, 50, 2), part(2000, 2, 52)])

    together, *pieces, first, second = calls
    assert together.parts == (part(100, 1), part(200, 1, 1))
    assert [(piece.rows, piece.parts[0].start, piece.num_pairs) for piece in pieces] == [
        (slice(2, 22), 0, 20 * 20),
        (slice(22, 42), 20, 20 * 40),
        (slice(42, 52), 40, 10 * 50),
    ]
    assert [call.num_pairs for call in (first, second)] == [2001, 2002]  # a token has more keys than a call may score


def test_a_token_may_read_only_earlier_keys_of_its_own_request() -> None:
    mask = IndexCall((part(2, 1), part(0, 3, 1))).mask()[0]

    assert mask.int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1, 1],
    ]


def test_chosen_keys_of_other_requests_are_never_read() -> None:
    call = IndexCall((part(2, 1), part(0, 2, 1)))  # keys 0 to 2, and 3 to 4

    positions = call.positions(torch.tensor([[2, 0, 4], [3, 0, 4], [4, 3, 1]], dtype=torch.int32))

    assert positions.tolist() == [[2, 0, LATER], [0, LATER, 1], [1, 0, LATER]]


def test_indexers_are_the_models_own_between_passes_and_after_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_family("DeepSeek V3.2")
    before = weights_digest(model)
    runner = ModelRunner(model, BLOCK_SIZE, 1 << 20)
    forward = DeepseekV32Indexer.forward

    def fail(self: DeepseekV32Indexer, *args: Any, **kwargs: Any) -> Any:
        assert weights_digest(model) == before  # another engine may look at the model while this one computes
        raise MemoryError

    monkeypatch.setattr(DeepseekV32Indexer, "forward", fail)
    with pytest.raises(MemoryError):
        runner.run([Chunk([1, 2, 3], 0, [[0]])])

    monkeypatch.setattr(DeepseekV32Indexer, "forward", forward)
    assert runner.check_unchanged()
    assert weights_digest(model) == before


def _forward_with_a_mask(self: DeepseekV32Indexer, forward: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(self, *args, **kwargs).float()


def test_an_indexer_that_returns_no_indices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeepseekV32Indexer, "forward", partialmethod(_forward_with_a_mask, DeepseekV32Indexer.forward))

    with pytest.raises(UnsupportedModel, match="does not return the indices of the keys that it chose"):
        ModelRunner(build_family("DeepSeek V3.2"), BLOCK_SIZE, 1 << 20)


def test_index_keys_of_another_dtype_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_family("DeepSeek V3.2").to(torch.bfloat16)
    for module in model.modules():
        if hasattr(module, "k_norm"):
            module.k_norm.float()
            module.wk.float()
            module.weights_proj.float()
    forward = DeepseekV32Indexer.forward

    def call(self: DeepseekV32Indexer, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, hidden_states.float(), *args, **kwargs)

    monkeypatch.setattr(DeepseekV32Indexer, "forward", call)

    with pytest.raises(UnsupportedModel, match=r"the index keys of layer 0 have 3 dimensions and dtype torch.float32"):
        ModelRunner(model, BLOCK_SIZE, 1 << 20)


def test_an_indexer_that_is_not_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_family("DeepSeek V3.2")
    model.model.layers[1].self_attn.another = torch.nn.Identity()
    model.model.layers[1].self_attn.another.layer_idx = 1

    with pytest.raises(UnsupportedModel, match="layer 1 keeps index keys and has 2 modules that may be its indexer"):
        ModelRunner(model, BLOCK_SIZE, 1 << 20)


@pytest.mark.parametrize(
    ("name", "attention", "reason"),
    [
        ("llama", LlamaAttention, "chooses the keys that it reads, and keeps no latent rows"),
        ("mistral", MistralAttention, "chooses the keys that it reads within a window or chunk"),
    ],
)
def test_chosen_keys_of_other_layers_are_refused(
    name: str, attention: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "forward", partialmethod(_forward_with_indices, attention.forward))

    with pytest.raises(UnsupportedModel, match=f"layer 0 {reason}"):
        ModelRunner(build(name), BLOCK_SIZE, 1 << 20)


def _forward_with_indices(self: Any, forward: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    chosen = torch.zeros(1, hidden_states.shape[1], 1, dtype=torch.int32)
    return forward(self, hidden_states, *args, **kwargs, indices=chosen)


def test_index_keys_that_come_from_no_indexer_are_refused() -> None:
    keys, kept = torch.ones(1, 2, 8), torch.zeros(4, BLOCK_SIZE, 8)
    places = torch.zeros(2, dtype=torch.int64)

    with pytest.raises(UnsupportedModel, match="updates index keys outside of an indexer"):
        IndexStep([part(0, 2)]).receive(keys, kept, places, places)
    with pytest.raises(UnsupportedModel, match="layer 3 has index keys that it did not have"):
        Step((), {}).receive_index(keys, 3)
    assert not kept.any()


def test_an_adapter_of_an_indexer_is_refused(tmp_path: Path) -> None:
    folder = save_adapter(build_family("DeepSeek V3.2"), tmp_path / "adapter", target_modules=["wq_b"], r=2)
    model = build_family("DeepSeek V3.2")
    adapter = load_adapter(model, "ann", folder)

    with pytest.raises(UnusableLora, match="wq_b chooses the keys that are read"):
        ModelRunner(model, BLOCK_SIZE, 1 << 20, [adapter])
