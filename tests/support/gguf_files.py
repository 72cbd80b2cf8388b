"""The small Llama as a GGUF file, as llama.cpp's converter would write it."""

from pathlib import Path

import gguf
import numpy as np
from small_models import COMMON, build
from tokenizers.pre_tokenizers import ByteLevel

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(file: Path) -> None:
    """Write `build("llama")`, with a token for each byte and a chat template."""
    model = build("llama")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("small llama")
    writer.add_context_length(COMMON["max_position_embeddings"])
    writer.add_embedding_length(COMMON["hidden_size"])
    writer.add_feed_forward_length(COMMON["intermediate_size"])
    writer.add_block_count(COMMON["num_hidden_layers"])
    writer.add_head_count(COMMON["num_attention_heads"])
    writer.add_head_count_kv(COMMON["num_key_value_heads"])
    writer.add_key_length(COMMON["head_dim"])
    writer.add_rope_dimension_count(COMMON["head_dim"])
    writer.add_rope_freq_base(float(model.config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_vocab_size(COMMON["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(ByteLevel.alphabet())[:-1], "QZ"])  # one for a merge: without any it is no BPE
    writer.add_token_merges(["Q Z"])
    writer.add_chat_template(TEMPLATE)
    for name, weights in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), _as_llama_cpp_has_it(name, weights.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(
            name, "output.weight"
        )
    layer_id, _, module = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
    return f"blk.{layer_id}.{_NAMES[module]}.weight"


def _as_llama_cpp_has_it(name: str, weights: np.ndarray) -> np.ndarray:
    """Of queries and keys, what RoPE turns together stands side by side; transformers has it half a head apart."""
    heads = {"q_proj": COMMON["num_attention_heads"], "k_proj": COMMON["num_key_value_heads"]}
    for projection, num_heads in heads.items():
        if projection in name:
            pairs = weights.reshape(num_heads, 2, COMMON["head_dim"] // 2, -1)
            return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weights.shape))
    return weights
