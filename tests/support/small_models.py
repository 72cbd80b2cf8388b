"""Small models with random weights, and a tokenizer of bytes: for benchmarks of exactness and tests of the engine."""

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 256
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HYBRID = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
MODELS = {
    "llama": lambda common: LlamaForCausalLM(LlamaConfig(**common)),
    "qwen3": lambda common: Qwen3ForCausalLM(Qwen3Config(**common)),
    "mistral": lambda common: MistralForCausalLM(MistralConfig(**common, sliding_window=40)),
    "gemma3": lambda common: Gemma3ForCausalLM(Gemma3TextConfig(**common, sliding_window=40, layer_types=HYBRID)),
    "deepseek_v3": lambda common: DeepseekV3ForCausalLM(  # latent rows, of as many bytes as the keys and values above
        DeepseekV3Config(
            **{**common, "num_key_value_heads": 4},
            q_lora_rank=32,
            kv_lora_rank=48,
            qk_rope_head_dim=16,
            qk_nope_head_dim=16,
            v_head_dim=24,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        )
    ),
    "deepseek_v32": lambda common: DeepseekV32ForCausalLM(  # reads 24 keys, chosen by index keys in the latent rows
        DeepseekV32Config(
            **{**common, "num_key_value_heads": 4},
            q_lora_rank=32,
            kv_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=24,
            index_topk=24,
            index_n_heads=32,
            index_head_dim=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
        )
    ),
}
MORE_MODELS = {
    "gemma2": lambda common: Gemma2ForCausalLM(Gemma2Config(**common, sliding_window=40)),  # capped scores
    "gpt_oss": lambda common: GptOssForCausalLM(  # attention sinks
        GptOssConfig(**common, num_local_experts=4, num_experts_per_tok=2, sliding_window=40)
    ),
    "llama4": lambda common: Llama4ForCausalLM(  # chunked attention, and a temperature that grows with the position
        Llama4TextConfig(
            **common,
            num_local_experts=2,
            attention_chunk_size=48,
            intermediate_size_mlp=128,
            floor_scale=16,
            no_rope_layers=[1, 1, 1, 0],
        )
    ),
}


def build(name: str, device: str = "cpu", spread: float = 0.2) -> PreTrainedModel:
    """The model of that name in float32; the same weights every time.

    With weights of so wide a *spread* greedy choices are far apart, and a wrong block changes them.
    """
    torch.manual_seed(7)
    common = {**COMMON, "initializer_range": spread}
    return {**MODELS, **MORE_MODELS}[name](common).eval().to(device)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def plain_greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """What plain transformers answers: its own attention, its own cache."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        output = model.generate(
            torch.tensor([prompt], device=model.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=True,
        )
    finally:
        model.set_attn_implementation(before)
    return output[0, len(prompt) :].tolist()
