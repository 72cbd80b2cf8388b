"""Makes a tiny model with random weights whose greedy tokens depend on all of its prompt: vllm_model.py FOLDER
[KIND [SEED]]."""

import sys

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCABULARY = 512
WINDOW_TOKENS = 512
FIRST_NORM = "layers.0.input_layernorm.weight"
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def main(folder: str, kind: str = "llama", seed: str = "0") -> None:
    """Save model and tokenizer in *folder*; another *seed* gives other weights."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        words[letter] = len(words)
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=16384
    ).save_pretrained(folder)

    torch.manual_seed(int(seed))
    if kind == "eagle":
        save_eagle(folder)
        return
    model = KINDS[kind]().to(torch.bfloat16)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 2:  # so large that the greedy token is no tie, and another one for another prompt
                scale = 1.0 if "embed" in name else 2.0 / weights.shape[1] ** 0.5
                weights.copy_(torch.randn_like(weights, dtype=torch.float32) * scale)
    model.save_pretrained(folder)


def save_eagle(folder: str) -> None:
    """Save a drafter for "llama" as EAGLE's authors do: a layer without its first norm, and what joins its inputs."""
    config = LlamaConfig(**{**SHAPE, "num_hidden_layers": 1}, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    weights = LlamaForCausalLM(config).model.state_dict()
    kept = {name: value for name, value in weights.items() if name not in ("norm.weight", FIRST_NORM)}
    kept["fc.weight"] = torch.zeros(SHAPE["hidden_size"], 2 * SHAPE["hidden_size"])
    for name, value in kept.items():
        kept[name] = (
            torch.randn(value.shape) * (2.0 / value.shape[-1] ** 0.5) if value.dim() == 2 else value
        ).bfloat16()
    save_file({name: value.contiguous() for name, value in kept.items()}, f"{folder}/model.safetensors")


def gemma() -> Gemma3ForCausalLM:
    """A hybrid: five layers of six see a window."""
    kinds = [*["sliding_attention"] * 5, "full_attention"]
    config = Gemma3TextConfig(
        **{**SHAPE, "num_hidden_layers": 6}, sliding_window=WINDOW_TOKENS, layer_types=kinds, query_pre_attn_scalar=64
    )
    return Gemma3ForCausalLM(config)


def smol() -> LlamaForCausalLM:
    """The shape of SmolLM2-135M, the smallest model that people serve, without its vocabulary."""
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **shape, "num_attention_heads": 9, "num_key_value_heads": 3}))


def qwen3_next() -> Qwen3NextForCausalLM:
    """Gated delta nets, whose states are kept, and full attention, in turn."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "shared_expert_intermediate_size": 64}
    kinds = ["linear_attention", "full_attention"] * 2
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SHAPE, **experts, **heads, **sizes, layer_types=kinds))


def lfm2() -> Lfm2ForCausalLM:
    """Short convolutions, whose states are kept, and full attention, in turn."""
    read_by_vllm = {"block_dim": 256, "conv_dim": 256, "conv_dim_out": 256}
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    kinds = ["conv", "full_attention"] * 2
    return Lfm2ForCausalLM(Lfm2Config(**shape, **read_by_vllm, conv_L_cache=3, layer_types=kinds))


def deepseek_v3() -> DeepseekV3ForCausalLM:
    """Latent attention: 576 numbers a token and layer, as DeepSeek V3 has. Without experts, as rounding may choose
    others of these for a prompt that is computed in other chunks."""
    shape = {name: value for name, value in SHAPE.items() if name not in ("head_dim", "num_key_value_heads")}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "q_lora_rank": 96}
    config = DeepseekV3Config(**shape, **latent, num_key_value_heads=4, first_k_dense_replace=4)
    return DeepseekV3ForCausalLM(config)


KINDS = {
    "deepseek_v3": deepseek_v3,
    "lfm2": lfm2,
    "qwen3_next": qwen3_next,
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "gemma3": gemma,
    "smol": smol,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
