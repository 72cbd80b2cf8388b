"""Families of transformers' models, small and with random weights: equal to plain transformers, or refused with why."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from small_models import COMMON, VOCAB
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from kvtier.engine.model.attention import paged_attention
from kvtier.engine.model.digest import weights_digest
from kvtier.engine.model.errors import UnsupportedModel
from kvtier.engine.model.runner import Chunk, ModelRunner

BLOCK_SIZE = 16
STEPS = (40, 1, 29, 50)
SMALL = {**COMMON, "num_hidden_layers": 2, "initializer_range": 0.1}
WINDOW = {"sliding_window": 24}
HALF = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "head_dim": 8,  # of the rotated part
}
# With few index heads, index scores are often equal, and the choice between equal keys is arbitrary.
CHOSEN = {**LATENT, "index_topk": 24, "index_n_heads": 32, "index_head_dim": 16}
# As published, with the last layers reading the keys and values of earlier ones.
SHARED_KV = {
    **COMMON,
    "pad_token_id": 0,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    **WINDOW,
}
TUNED = {  # the temperature of attention grows with a token's position
    "num_hidden_layers": 4,
    "num_local_experts": 2,
    "attention_chunk_size": 48,
    "intermediate_size_mlp": 128,
    "attn_temperature_tuning": True,
    "floor_scale": 16,
    "attn_scale": 0.5,
    "no_rope_layers": [1, 0, 1, 0],
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)],
    "factor": 64.0,
}
LONG_PHI3 = {
    "original_max_position_embeddings": 64,
    "rope_parameters": LONG_ROPE,
    "sliding_window": None,
}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": VOCAB, "initializer_range": 0.1}
EQUAL: dict[str, dict[str, Any]] = {
    "AXK2": CHOSEN,
    "Apertus": {},
    "Arcee": {},
    "BioGpt": {},
    "BitNet": {},
    "CodeGen": {**GPT, "rotary_dim": 8},
    "Cohere": {},
    "Cohere2": HALF,
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT,
    "DeepseekV32": CHOSEN,
    "Dots3Note": {**CHOSEN, **WINDOW, "num_hidden_layers": 4, "swa_kv_lora_rank": 16},
    "Ernie4_5": {},
    "Exaone4": HALF,
    "FlexOlmo": EXPERTS,
    "GPT2": GPT,
    "GPTBigCode": GPT,
    "GPTJ": {**GPT, "rotary_dim": 8},
    "GPTNeoX": {},
    "Gemma": {},
    "Gemma2": HALF,
    "Gemma3n": {**SHARED_KV, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 6},
    "Gemma4": {**SHARED_KV, "global_head_dim": 16},
    "Glm": {},
    "Glm4MoeLite": LATENT,
    "Glm4": {},
    "GlmMoeDsa": {**CHOSEN, "index_topk_freq": 2, "num_hidden_layers": 4},
    "Granite": {},
    "GraniteMoe": EXPERTS,
    "HYV4": {**CHOSEN, "num_hidden_layers": 4},
    "Helium": {},
    "Llama4": TUNED,
    "MiMoV2Flash": {"head_dim": 24, "v_head_dim": 16, "swa_head_dim": 24, "swa_v_head_dim": 16, **WINDOW},
    "MiniCPM3": LATENT,
    "Mixtral": EXPERTS,
    "ModernBertDecoder": {
        "local_attention": 24,
        **{f"{kind}_token_id": 0 for kind in ("bos", "eos", "cls", "sep", "pad")},
    },
    "NanoChat": {},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": HALF,
    "Olmoe": EXPERTS,
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "Phi": {},
    "Phi3": WINDOW,
    "Qwen2": {},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3Moe": EXPERTS,
    "SeedOss": {},
    "SmolLM3": {},
    "StableLm": {},
    "Starcoder2": WINDOW,
    "VaultGemma": HALF,
    "Youtu": LATENT,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Bloom": ({"n_layer": 2, "n_head": 4}, "0 of its 2 layers call the attention function"),
    "Doge": ({"keep_window_size": 2048}, "attention mask of its own"),
    "Mamba": ({}, "does not compute a prompt in several chunks correctly"),
    "RecurrentGemma": ({}, "of its 2 layers call"),
}


TEXT_ONLY = {"Dots3Note", "Gemma3n", "Gemma4", "Llama4"}  # families whose text model has a configuration of its own


def build(family: str, more: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(7)
    text = "Text" if family in TEXT_ONLY else ""
    config = getattr(transformers, f"{family}{text}Config")(**{**SMALL, **more})
    names = (f"{family}ForCausalLM", f"{family}LMHeadModel")
    kind = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    model: PreTrainedModel = kind(config).eval()
    return model


@pytest.mark.parametrize("family", EQUAL)
def test_a_family_gives_the_logits_of_plain_transformers(family: str) -> None:
    model = build(family, EQUAL[family])
    prompt = random.Random(3).choices(range(VOCAB), k=sum(STEPS))
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        plain = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]

    runner = ModelRunner(model, BLOCK_SIZE, 1 << 20)
    tables = [random.Random(5).sample(range(runner.num_slots), 8) for _ in runner.groups]
    start, worst = 0, 0.0
    for num_tokens in STEPS:
        logits = runner.run([Chunk(prompt[start : start + num_tokens], start, tables)])[0]
        start += num_tokens
        worst = max(worst, float((logits - plain[start - 1]).abs().max() / plain.abs().max()))

    assert worst <= 1e-5


@pytest.mark.parametrize("family", ["Gemma3n", "Gemma4"])
def test_layers_that_read_the_keys_and_values_of_others_keep_none(family: str) -> None:
    model = build(family, EQUAL[family])
    runner = ModelRunner(model, BLOCK_SIZE, 1 << 20)

    assert sorted(layer_id for group in runner.geometry for layer_id in group.layer_ids) == [0, 1, 2]
    assert [layer.source for layer in runner.layers] == [None, None, None, 1, 2, 1]


def logits_by_chunks(runner: ModelRunner, prompt: list[int], num_tokens: Sequence[int]) -> list[torch.Tensor]:
    tables = [random.Random(5).sample(range(runner.num_slots), 8) for _ in runner.groups]
    start, logits = 0, []
    for number in num_tokens:
        logits.append(runner.run([Chunk(prompt[start : start + number], start, tables)])[0])
        start += number
    return logits


def test_keys_of_a_short_prompt_are_right_in_a_long_one_if_the_model_chooses_frequencies_by_length() -> None:
    prompt = random.Random(3).choices(range(VOCAB), k=120)
    model = build("Phi3", LONG_PHI3)
    with torch.inference_mode():  # as long as this, so that transformers takes the long frequencies for every token
        plain = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]

    runner = ModelRunner(model, BLOCK_SIZE, 1 << 20)
    short, long = logits_by_chunks(runner, prompt, (60, 60))

    for found, expected in ((short, plain[59]), (long, plain[119])):
        assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-5


def test_a_model_no_longer_than_its_first_training_keeps_the_short_frequencies() -> None:
    prompt = random.Random(3).choices(range(VOCAB), k=64)
    model = build("Phi3", {**LONG_PHI3, "max_position_embeddings": 64})
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]

    runner = ModelRunner(model, BLOCK_SIZE, 1 << 20)
    *_, last = logits_by_chunks(runner, prompt, (60, 4))

    assert float((last - plain[63]).abs().max() / plain[63].abs().max()) <= 1e-5


def test_a_model_chooses_its_frequencies_again_after_the_last_engine_closed() -> None:
    prompt = torch.tensor([random.Random(3).choices(range(VOCAB), k=60)])
    model = build("Phi3", LONG_PHI3)
    with torch.inference_mode():
        before = model(input_ids=prompt, use_cache=False).logits
        first, second = (ModelRunner(model, BLOCK_SIZE, 1 << 20) for _ in range(2))
        first.close()
        with second.claim.own_attention():
            meanwhile = model(input_ids=prompt, use_cache=False).logits
        second.close()
        after = model(input_ids=prompt, use_cache=False).logits

    assert torch.equal(before, after)
    assert not torch.equal(before, meanwhile)


def test_the_chosen_frequencies_are_part_of_the_namespace() -> None:
    model = build("Phi3", LONG_PHI3)
    before = weights_digest(model)

    runner = ModelRunner(model, BLOCK_SIZE, 1 << 20)

    assert runner.namespace("sha256", "").weights_digest != before
    runner.close()
    assert weights_digest(model) == before


def test_frequencies_that_a_pass_has_left_can_be_fixed() -> None:
    """transformers before 5.24 replaces them in a pass, and those of a pass in inference mode are read-only outside."""
    model = build("Phi3", LONG_PHI3)
    embedding = next(module for module in model.modules() if hasattr(module, "rope_type"))
    with torch.inference_mode():
        embedding.register_buffer("inv_freq", embedding.inv_freq.clone(), persistent=False)
    before = embedding.inv_freq.clone()

    runner = ModelRunner(model, BLOCK_SIZE, 1 << 20)

    assert not torch.equal(embedding.inv_freq, before)
    runner.close()
    assert torch.equal(embedding.inv_freq, before)


def test_an_embedding_that_cannot_be_fixed_is_refused_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Phi3", LONG_PHI3)
    embedding = next(module for module in model.modules() if hasattr(module, "rope_type"))
    monkeypatch.delitem(model.config.rope_parameters, "long_factor")

    with pytest.raises(UnsupportedModel, match=r"longrope\) cannot be fixed"):
        ModelRunner(model, BLOCK_SIZE, 1 << 20)

    assert embedding.rope_type == "longrope"


def test_an_embedding_whose_scale_also_depends_on_the_prompt_is_refused() -> None:
    scales = {"short_mscale": 1.1, "long_mscale": 1.3}
    more = {**EXPERTS, "original_max_position_embeddings": 64, "rope_parameters": {**LONG_ROPE, **scales}}
    model = build("Phimoe", more)

    with pytest.raises(UnsupportedModel, match=r"longrope\) changes with the length of the prompt"):
        ModelRunner(model, BLOCK_SIZE, 1 << 20)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_paged_is_refused_with_the_reason(family: str) -> None:
    more, reason = REFUSED[family]
    model = build(family, more)

    with pytest.raises(UnsupportedModel, match=reason) as refused:
        ModelRunner(model, BLOCK_SIZE, 1 << 20)

    assert "\n" not in str(refused.value)
    assert "Error" not in str(refused.value)


class DenseUntilAttention(LlamaAttention):
    """Changes what it computes beyond a number of tokens, as sparse attention that begins at a length does."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.shape[1] > self.config.dense_until:
            hidden_states = hidden_states - hidden_states.mean(1, keepdim=True)
        return super().forward(hidden_states, *args, **kwargs)


class DenseUntilLlama(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer_id, layer in enumerate(self.model.layers):
            layer.self_attn = DenseUntilAttention(config, layer_id)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_begins_thousands_of_tokens_later_is_seen_at_load(dtype: torch.dtype) -> None:
    model = DenseUntilLlama(LlamaConfig(**SMALL, dense_until=4096)).to(dtype).eval()

    with pytest.raises(UnsupportedModel, match="differ from its own"):
        ModelRunner(model, BLOCK_SIZE, 1 << 20)


def test_a_mask_that_is_another_than_the_configuration_says_is_seen_at_its_edge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.mistral import modeling_mistral

    make_mask = modeling_mistral.create_sliding_window_causal_mask

    def make_another(config: MistralConfig, *args: Any, **kwargs: Any) -> Any:
        return make_mask(config, *args, **kwargs, and_mask_function=lambda batch, head, query, key: query - key != 4000)

    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", make_another)
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4001)).eval()

    with pytest.raises(UnsupportedModel, match="the token at 4000 does not read the token at 0"):
        ModelRunner(model, BLOCK_SIZE, 1 << 20)


def test_a_model_keeps_its_own_attention_when_it_is_refused() -> None:
    model = build("Doge", {"keep_window_size": 2048})
    before = model.config._attn_implementation

    with pytest.raises(UnsupportedModel):
        ModelRunner(model, BLOCK_SIZE, 1 << 20)

    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("handed", "reason"),
    [
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "attention mask of its own"),
        ({"attention_mask": None, "block_indices": torch.zeros(1, 2)}, "block_indices"),
    ],
)
def test_a_step_does_not_leave_out_what_attention_is_handed(handed: dict[str, Any], reason: str) -> None:
    tokens = torch.zeros(1, 2, 2, 16)

    with pytest.raises(UnsupportedModel, match=reason):
        paged_attention(torch.nn.Module(), tokens, tokens, tokens, **handed)
