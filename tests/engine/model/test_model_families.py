"""Families of transformers' models, small and with random weights: equal to plain transformers, or refused with why."""

import random
from typing import Any

import pytest
import torch
import transformers
from small_models import COMMON, VOCAB
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from kvtier.engine.model.attention import paged_attention
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
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": VOCAB, "initializer_range": 0.1}
EQUAL: dict[str, dict[str, Any]] = {
    "Apertus": {},
    "Arcee": {},
    "BioGpt": {},
    "BitNet": {},
    "CodeGen": {**GPT, "rotary_dim": 8},
    "Cohere": {},
    "Cohere2": HALF,
    "Ernie4_5": {},
    "Exaone4": HALF,
    "FlexOlmo": EXPERTS,
    "GPT2": GPT,
    "GPTBigCode": GPT,
    "GPTJ": {**GPT, "rotary_dim": 8},
    "GPTNeoX": {},
    "Gemma": {},
    "Gemma2": HALF,
    "Glm": {},
    "Glm4": {},
    "Granite": {},
    "GraniteMoe": EXPERTS,
    "Helium": {},
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
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Bloom": ({"n_layer": 2, "n_head": 4}, "0 of its 2 layers call the attention function"),
    "DeepseekV2": (LATENT, "latent attention"),
    "DeepseekV3": (LATENT, "latent attention"),
    "DeepseekV32": ({**LATENT, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16}, "sparse attention|latent"),
    "Doge": ({"keep_window_size": 2048}, "attention mask of its own"),
    "FalconH1": ({}, "of kind hybrid"),
    "Mamba": ({}, "0 of its 2 layers call the attention function"),
    "MiMoV2Flash": ({}, "its keys have"),
    "RecurrentGemma": ({}, "of its 2 layers call"),
}


def build(family: str, more: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **more})
    names = (f"{family}ForCausalLM", f"{family}LMHeadModel")
    kind = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    model: PreTrainedModel = kind(config).eval()
    return model


@pytest.mark.parametrize("family", EQUAL)
def test_a_family_gives_the_logits_of_plain_transformers(family: str) -> None:
    model = build(family, EQUAL[family])
    prompt = [random.Random(3).randrange(VOCAB) for _ in range(sum(STEPS))]
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
