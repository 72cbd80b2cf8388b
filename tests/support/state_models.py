"""Small models with random weights whose layers keep recurrent or convolution states."""

from typing import Any

import torch
import transformers
from small_models import COMMON
from transformers import PreTrainedModel

SMALL = {**COMMON, "initializer_range": 0.2}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "pad_token_id": 0,
}
ALTERNATING = ["linear_attention", "full_attention"] * 2
# By the name of the class, without "ForCausalLM" and, if it is the text part of a larger configuration, with "Text".
FAMILIES: dict[str, dict[str, Any]] = {
    "Bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "BailingHybrid": {
        **LATENT,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": ALTERNATING,
        "n_group": 1,
        "topk_group": 1,
        **EXPERTS,
    },
    "FalconH1": {**MAMBA, "mamba_d_ssm": 128},  # attention and a state in every layer
    "GraniteMoeHybrid": {**MAMBA, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 64},
    "KimiLinear": {
        **LATENT,
        **EXPERTS,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_local_experts": 4,
        "layer_types": ALTERNATING,
    },
    "LaraMini": {**LINEAR, "sliding_window": 40},
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm3": {"sliding_window": 40},
    "Mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16, "expand": 2},
    "NemotronH": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "moe_latent_size": None,
    },
    "OlmoHybrid": {**LINEAR, "layer_types": ALTERNATING},
    "Qwen3_5Text": {**LINEAR, "layer_types": ALTERNATING},
    "Qwen3_5MoeText": {**LINEAR, **EXPERTS, "layer_types": ALTERNATING, "shared_expert_intermediate_size": 32},
    "Qwen3Next": {**LINEAR, **EXPERTS, "layer_types": ALTERNATING, "shared_expert_intermediate_size": 32},
    "Zamba2": {  # one attention module for several layers
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "mamba_ngroups": 1,
        "mamba_d_state": 16,
        "n_mamba_heads": 4,
        "mamba_headdim": 32,
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": False,
        "adapter_rank": 8,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
}


def build_states(family: str) -> PreTrainedModel:
    """The model of that family in float32; the same weights every time, far apart as in `small_models.build`."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **FAMILIES[family]})
    kind = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")
    model: PreTrainedModel = kind(config).eval()
    for name, weights in model.named_parameters():
        if weights.dim() >= 2 and "A_log" not in name and "conv" not in name:
            weights.data.normal_(0, 0.5 if "embed" in name else 0.2)
    model.set_attn_implementation("eager")
    return model
