"""Adapters with random weights for the small models, and what plain transformers with peft answers with them."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from small_models import build
from transformers import PreTrainedModel

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION + MLP},
    "ranked": {"r": 9, "lora_alpha": 6, "target_modules": ATTENTION, "use_rslora": True, "rank_pattern": {"k_proj": 2}},
    "mlp": {"r": 3, "lora_alpha": 12, "target_modules": MLP},
}


def save_adapter(base: PreTrainedModel, folder: Path, seed: int = 0, **settings: object) -> Path:
    """Write an adapter as somebody who trained *base* would; *base* is not to be used afterwards."""
    torch.manual_seed(seed)
    adapted = get_peft_model(base, LoraConfig(**{"init_lora_weights": False, **settings}))
    with torch.no_grad():
        for name, weights in adapted.named_parameters():
            if "lora_" in name:
                weights.normal_(0, 0.2)
    adapted.save_pretrained(str(folder))
    return folder


def save_adapters(model_name: str, folder: Path) -> dict[str, Path]:
    """All of `ADAPTERS`, by name."""
    return {
        name: save_adapter(build(model_name), folder / name, seed, **settings)
        for seed, (name, settings) in enumerate(ADAPTERS.items())
    }


def plain_adapted(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """*base* with peft's own layers in it."""
    adapted = PeftModel.from_pretrained(base, str(folder)).eval()
    return adapted.base_model.model
