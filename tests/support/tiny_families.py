"""Small models with random weights, one of each type of causal model that transformers can build.

Their configurations are transformers' defaults with small sizes, and with the traits of published models that the
defaults lack.
"""

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CAUSAL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB = 256
NUM_LAYERS = 4
WINDOW = 40
MAX_PARAMETERS = 32_000_000


class NotBuilt(Exception):
    """An error for a type of which transformers builds no small model; the message says why."""


def _each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


# Values of a configuration's keys, where its class has a key of that name.
SIZES: dict[str, Any] = {
    **_each("vocab_size n_words vocab_size_per_layer_input unpadded_vocab_size", VOCAB),
    **_each("hidden_size d_model n_embd emb_dim embed_dim dim word_embed_proj_dim attention_hidden_size lru_width", 64),
    **_each("intermediate_size ffn_dim n_inner d_inner dff d_ff dim_ff ffn_hidden_size intermediate_size_mlp", 128),
    **_each("encoder_ffn_dim decoder_ffn_dim", 128),
    **_each("num_hidden_layers n_layer num_layers n_layers num_decoder_layers", NUM_LAYERS),
    **_each("encoder_layers decoder_layers", NUM_LAYERS),
    **_each("num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads", 4),
    **_each("linear_num_heads linear_num_value_heads mamba_n_heads mamba_num_heads n_mamba_heads", 4),
    **_each("num_key_value_heads num_kv_heads multi_query_group_num linear_num_key_heads", 2),
    **_each("head_dim kv_channels query_pre_attn_scalar rotary_dim dim_head linear_head_dim", 16),
    **_each("linear_key_head_dim linear_value_head_dim", 16),
    **_each("max_position_embeddings n_positions n_ctx max_seq_len context_length", 1024),
    **_each("num_experts num_local_experts n_routed_experts moe_num_experts ffn_num_experts zero_expert_num", 4),
    **_each("num_experts_per_tok moe_k moe_topk top_k_experts experts_per_token", 2),
    **_each("moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size", 64),
    **_each("expert_ffn_hidden_size moe_shared_expert_intermediate_size shared_experts_intermediate_size", 64),
    **_each("n_group topk_group n_shared_experts first_k_dense_replace", 1),
    **_each("q_lora_rank qk_head_dim index_n_heads", 32),
    **_each("kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim", 16),
    **_each("index_topk", 64),
    **_each("sliding_window attention_window_size local_attention window_size sliding_window_size", WINDOW),
    **_each("attention_chunk_size", 48),
    **_each("mamba_d_head mamba_head_dim mamba_headdim", 32),
    **_each("mamba_d_ssm", 128),
    **_each("mamba_d_state ssm_state_size mamba_chunk_size chunk_size", 16),
    **_each("mamba_n_groups", 1),
    **_each("mamba_expand", 2),
    **_each("hidden_size_per_layer_input laurel_rank patch_size", 8),
    **_each("image_size", 32),
    **_each("pad_token_id cls_token_id sep_token_id", 0),
    **_each("bos_token_id", 1),
    **_each("eos_token_id", 2),
    **_each("is_decoder", True),
}
# Lists with an entry for each layer. A small model has each kind of entry.
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "indexer_types")

LINEAR = ["linear_attention", "full_attention"] * 2
SLIDING = ["sliding_attention", "full_attention"] * 2
CONVOLUTION = ["conv", "full_attention"] * 2
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)],
    "factor": 16.0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SHARED_KV = {  # the last layers read the keys and values of earlier ones
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
GEMMA3N = {**SHARED_KV, "activation_sparsity_pattern": [0.0] * 6}
GEMMA4 = {**SHARED_KV, "global_head_dim": 16}
LLAMA4 = {  # the temperature of attention grows with a token's position
    "attn_temperature_tuning": True,
    "floor_scale": 16,
    "attn_scale": 0.5,
    "no_rope_layers": [1, 0, 1, 0],
}
LATENT = {"num_key_value_heads": 4}  # each head has keys and values of its own
DOTS3 = {
    **LATENT,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 32,
    "indexer_compress_ratio": 8,
}
ZAMBA = {"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_dt_rank": 8}
NO_LAYER_INPUTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# Traits of published models that the defaults lack, and values that fit the sizes above.
TRAITS: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "axk2": LATENT,
    "bailing_hybrid": LATENT,
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {"hidden_size_global": 64, "num_key_value_heads": 4},
        "decoder_config": {"hidden_size_global": 64, "num_key_value_heads": 4},
    },
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROPE)},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64},
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "rope_parameters": YARN},
    "deepseek_v32": LATENT,
    "dots3_note": {
        "text_config": DOTS3,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"num_key_value_heads": 4, "adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": DOTS3,
    "gemma3n": {"text_config": GEMMA3N},
    "gemma3n_text": GEMMA3N,
    "gemma4": {"text_config": GEMMA4},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **NO_LAYER_INPUTS}},
    "gemma4_text": GEMMA4,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": LINEAR},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_dt_rank": 8},
    "kimi_k25": {"text_config": LATENT},
    "kimi_linear": LATENT,
    "laguna": {"layer_types": SLIDING},
    "lfm2": {"layer_types": CONVOLUTION},
    "lfm2_moe": {"layer_types": CONVOLUTION},
    "llama4": {"text_config": LLAMA4},
    "llama4_text": LLAMA4,
    "longcat_flash": LATENT,
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1},
    "mellum": {"layer_types": SLIDING},
    "mimo_v2_flash": {"head_dim": 24, "v_head_dim": 16, "swa_head_dim": 24, "swa_v_head_dim": 16},
    "minicpm3": LATENT,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "index_block_size": 16,
        "index_topk_blocks": 2,
    },
    "ministral3": {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    "mistral_large4": {"text_config": LATENT},
    "nemotron_h": {
        "n_groups": 1,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
    },
    "phi3": {"sliding_window": WINDOW},
    "phi3 with LongRoPE": {"original_max_position_embeddings": 64, "rope_parameters": LONG_ROPE},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [32, 32]},
    "sarvam_mla": LATENT,
    "starcoder2": {"sliding_window": WINDOW},
    "xmod": {"default_language": "en_XX"},
    "youtu": LATENT,
    "zamba": ZAMBA,
    "zamba2": {**ZAMBA, "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1},
}
FAMILIES = tuple(
    sorted({*CAUSAL_TYPES, *(name for name in TRAITS if " with " in name)})
)  # types, and "TYPE with TRAIT"
_RESERVED = ("A_log", "dt_bias", "conv")  # weights that a recurrent state needs as transformers initialises them


def type_of(family: str) -> str:
    """Return the type of a family's configuration."""
    return family.partition(" with ")[0]


def tiny_config(family: str, **more: Any) -> PreTrainedConfig:
    """Return the configuration of a small model. *more* are further values of its keys."""
    return _small(CONFIG_MAPPING[type_of(family)], {**TRAITS.get(family, {}), **more})


def _small(kind: type[PreTrainedConfig], traits: Mapping[str, Any]) -> PreTrainedConfig:
    default = kind()
    values = default.to_dict()
    names = {*values, *inspect.signature(kind.__init__).parameters}
    small = {name: size for name, size in SIZES.items() if name in names}
    if values.get("sliding_window") is None:
        small.pop("sliding_window", None)
    for name in PER_LAYER:
        if kinds := list(dict.fromkeys(values.get(name) or [])):
            small[name] = [kinds[i % len(kinds)] for i in range(NUM_LAYERS)]
    small |= traits
    for name in default.sub_configs:
        part, of_part = getattr(default, name, None), dict(traits.get(name, {}))
        part_type = of_part.pop("model_type", None)
        if part_type is not None or isinstance(part, PreTrainedConfig):
            of_type: Any = CONFIG_MAPPING[part_type] if part_type else type(part)
            small[name] = _small(of_type, of_part).to_dict()
    return kind(**small)


def tiny_model(family: str, kind: Any = AutoModelForCausalLM, **more: Any) -> PreTrainedModel:
    """Build a small model in float32 with its own attention ("eager"). Its weights are the same every time.

    *kind* is the class of transformers that builds it. *more* are further values of its configuration. The weights are
    spread wide, so that the likeliest tokens are far apart and depend on all tokens before them.

    Raises:
        NotBuilt: If transformers cannot build it.
    """
    try:
        model = _built(tiny_config(family, **more), kind)
    except NotBuilt:
        raise
    except Exception as error:  # transformers' configurations and models raise errors of many types
        raise NotBuilt(first_reason(str(error))) from error
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() < 2 and not any(part in name for part in _RESERVED):
                weights.add_(torch.randn_like(weights), alpha=0.1)
            elif weights.dim() >= 2 and not any(part in name for part in _RESERVED):
                weights.normal_(0, 0.1 if "embed" in name else 0.2)
    model.set_attn_implementation("eager")
    return model


def first_reason(message: str) -> str:
    """Return the first sentence of an error's message, without the names of the checks of a configuration."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    line = next((line for line in lines if "alidation error for" not in line), message)
    return line.removeprefix("ValueError: ").partition(". ")[0]


def _built(config: PreTrainedConfig, kind: Any) -> PreTrainedModel:
    with torch.device("meta"):
        skeleton: PreTrainedModel = kind.from_config(config)
    num_parameters = sum(weights.numel() for weights in skeleton.parameters())
    if num_parameters > MAX_PARAMETERS:
        raise NotBuilt(f"its small model has {num_parameters:,} parameters")
    torch.manual_seed(7)
    model: PreTrainedModel = kind.from_config(config, dtype=torch.float32)
    return model.eval()  # type: ignore[no-any-return, no-untyped-call]


def lacks_attention_interface(model: PreTrainedModel) -> bool:
    """Return whether the model's file has attention layers, and none of them uses transformers' AttentionInterface."""
    source = inspect.getsource(inspect.getmodule(type(model)) or type(model))
    has_attention = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE) is not None
    return has_attention and "ALL_ATTENTION_FUNCTIONS" not in source


def reads_later_tokens(family: str) -> bool:
    """Return whether the type, as it is configured by default, is an encoder: tokens change the logits before them."""
    try:
        model = tiny_model(family, **({"is_decoder": False} if hasattr(tiny_config(family), "is_decoder") else {}))
        with torch.inference_mode():
            first, second = (
                model(input_ids=torch.tensor([[3, 9, 27, 81, last]]), use_cache=False).logits[0, :4] for last in (5, 99)
            )
    except Exception:  # a model that is not built, or runs on more than tokens
        return False
    return float((first - second).abs().max() / first.abs().max()) > 1e-2
