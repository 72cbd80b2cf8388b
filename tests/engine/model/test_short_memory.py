"""Memory that is too small is said to be: a model or an adapter is not called unusable for it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_adapters import save_adapter
from safetensors.torch import load_file, save_file
from small_models import COMMON, build
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from kvtier.cli.main import main
from kvtier.engine.model.checkpoint import Checkpoint
from kvtier.engine.model.lora_adapter import load_adapter
from kvtier.engine.model.runner import ModelRunner

FAR_TOO_MANY = 1 << 50  # numbers: no machine has so much memory, so torch's own error comes
SAYS_SO = re.compile("allocate memory")  # torch's words


class Greedy(LlamaMLP):
    """Takes far too much memory for that many tokens or more."""

    def forward(self, x: torch.Tensor) -> Any:
        if x.shape[1] >= self.config.too_many_tokens:
            torch.empty(FAR_TOO_MANY)
        return super().forward(x)


class GreedyLlama(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Greedy(config)


def greedy(too_many_tokens: int) -> PreTrainedModel:
    config = LlamaConfig(**{**COMMON, "num_hidden_layers": 2}, too_many_tokens=too_many_tokens)
    return GreedyLlama(config).eval()


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    """A checkpoint without its embeddings, whose configuration says that they are far too large."""
    folder = tmp_path / "huge"
    build("llama").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "embed_tokens" not in name and "lm_head" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": FAR_TOO_MANY >> 8}))
    return folder


def test_weights_that_memory_does_not_hold_are_no_unusable_model(huge: Path) -> None:
    with pytest.raises(MemoryError, match=SAYS_SO) as short:
        Checkpoint.of(huge).model("auto")

    assert f"loading the model {huge}" in str(short.value)
    assert "\n" not in str(short.value)


def test_the_command_line_says_in_one_line_that_memory_is_short(huge: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["demo", "--model", str(huge)])

    *_, error = capsys.readouterr().err.splitlines()  # behind the stages of the start
    assert status == 2
    assert "not enough memory" in error
    assert "smaller model" in error


@pytest.mark.parametrize("too_many_tokens", [2, 10, 40])  # seen layer by layer, compared, and as a miniature
def test_memory_that_is_short_while_a_model_is_checked_is_no_unusable_model(too_many_tokens: int) -> None:
    with pytest.raises(MemoryError, match=SAYS_SO):
        ModelRunner(greedy(too_many_tokens), 16, 1 << 20)


def test_memory_that_is_short_for_an_adapter_is_no_unusable_adapter(tmp_path: Path) -> None:
    folder = save_adapter(build("llama"), tmp_path, r=4, target_modules=["q_proj"])
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "r": FAR_TOO_MANY >> 8}))

    with pytest.raises(MemoryError, match=SAYS_SO) as short:
        load_adapter(build("llama"), "french", folder)

    assert "french" in str(short.value)
