"""Makes a LoRA adapter of vllm_model.py's Llama with random weights: vllm_adapter.py FOLDER SEED."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm_model import SHAPE

RANK = 8


def main(folder: str, seed: str) -> None:
    """Save the adapter in *folder*."""
    torch.manual_seed(int(seed))
    hidden, heads = SHAPE["hidden_size"], SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    tensors = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, rows in (("q_proj", hidden), ("v_proj", heads)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(RANK, hidden) * hidden**-0.5
            tensors[f"{path}.lora_B.weight"] = torch.randn(rows, RANK)
    Path(folder).mkdir(exist_ok=True)
    save_file(tensors, Path(folder) / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"]}
    (Path(folder) / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(*sys.argv[1:])
