"""Models whose prefixes are of no use in another prompt, and settings that mean nothing: refused when a cache opens."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_models import COMMON, VOCAB, build
from tiny_families import tiny_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from kvtier import KVTierCache, UnsupportedModel
from kvtier.engine.config import ConfigError


def rope(**parameters: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**COMMON, rope_parameters={"rope_theta": 1e4, "factor": 2.0, **parameters}))


def partly_on_another_device() -> PreTrainedModel:
    model = build("llama")
    model.model.layers[1].to("meta")
    return model


HALF = COMMON["head_dim"] // 2
REFUSED: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "dynamic rope": (lambda: rope(rope_type="dynamic").eval(), "keys of a prefix differ"),
    "long rope": (
        lambda: rope(
            rope_type="longrope",
            short_factor=[1.0] * HALF,
            long_factor=[3.0] * HALF,
            original_max_position_embeddings=2048,
        ).eval(),
        "keys of a prefix differ",
    ),
    "states": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)).eval(),
        "when the prompt continues",
    ),
    "an encoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=VOCAB, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
        ).eval(),
        "has an encoder",
    ),
    "positions beside index keys": (
        lambda: tiny_model("qwen4_exp_text").eval(),
        "keeps the positions of all tokens beside its index keys",
    ),
    "several devices": (partly_on_another_device, r"is on several devices \(cpu, meta\)"),
    "training": (lambda: build("llama").train(), r"call its eval\(\) first"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_prefixes_are_of_no_use_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    make, reason = REFUSED[name]

    with pytest.raises(UnsupportedModel, match=reason):
        KVTierCache.open(tmp_path / "store", make())
    assert not (tmp_path / "store").exists()


def test_settings_that_are_not_of_a_disk_are_refused(tmp_path: Path, model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"KVTierCache: .*capasity"):
        KVTierCache.open(tmp_path / "store", model, capasity="1GiB")
    with pytest.raises(ValueError, match="block_size 0"):
        KVTierCache.open(tmp_path / "store", model, block_size=0)
