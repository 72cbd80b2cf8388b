"""Everything that a model's modules hold is in its digest, or the model is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_models import VOCAB, build, byte_tokenizer, plain_greedy
from transformers import PreTrainedModel

from kvtier import LLM, SamplingParams
from kvtier.engine.model.digest import weights_digest
from kvtier.engine.model.errors import UnsupportedModel

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.ao says that it is deprecated; models made with it exist


def quantised(dtype: torch.dtype, shift: float) -> PreTrainedModel:
    """A model whose linear layers are packed, which are neither parameters nor buffers."""
    model = build("llama")
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "proj" in name:
                weights.add_(shift * torch.randn_like(weights))
    packed: PreTrainedModel = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=dtype)
    return packed


@pytest.mark.parametrize("dtype", [torch.float16, torch.qint8])
def test_packed_weights_are_digested(dtype: torch.dtype) -> None:
    one, same, other = (weights_digest(quantised(dtype, shift)) for shift in (0.0, 0.0, 0.2))

    assert one == same != other


def test_a_model_with_other_packed_weights_gets_nothing_from_the_store_of_the_first(tmp_path: Path) -> None:
    first, second = quantised(torch.float16, 0.0), quantised(torch.float16, 0.2)
    prompt = [(7 * i + 3) % VOCAB for i in range(90)]
    expected = plain_greedy(second, prompt, 8)
    config = {
        "device": {"capacity": "1MiB", "block_size": 16},
        "host": {"capacity": "1MiB"},
        "disk": {"path": str(tmp_path / "store"), "capacity": "64MiB"},
        "scheduler": {"load": "always"},
    }
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(first, config, byte_tokenizer()) as llm:
        llm.generate(prompt, sampling)

    with LLM(second, config, byte_tokenizer()) as llm:
        done = llm.generate(prompt, sampling)[0]

    assert done.tokens.recomputed == len(prompt)
    assert done.token_ids == expected


class Packed:
    """An object that a library of quantisation may keep beside its tensors."""

    def __init__(self, scale: float) -> None:
        self.parts = {"scale": torch.tensor([scale]), "axis": 1}


CHANGES: dict[str, Callable[[torch.nn.Module, float], object]] = {
    "a tensor that is no buffer": lambda layer, x: setattr(layer, "loose", torch.tensor([x])),
    "a private tensor": lambda layer, x: setattr(layer, "_loose", torch.tensor([x])),
    "tensors in a dict in a list": lambda layer, x: setattr(layer, "loose", [{"scale": torch.tensor([x])}]),
    "a number": lambda layer, x: setattr(layer, "scaling", x),
    "an object with tensors": lambda layer, x: setattr(layer, "meta", Packed(x)),
    "a buffer that no file holds": lambda layer, x: layer.register_buffer("b", torch.tensor([x]), persistent=False),
    "an array": lambda layer, x: setattr(layer, "table", torch.tensor([x]).numpy()),
    "the scale of a quantised tensor": lambda layer, x: setattr(
        layer, "packed", torch.quantize_per_tensor(torch.zeros(4), x, 0, torch.qint8)
    ),
    "a sparse tensor": lambda layer, x: setattr(layer, "sparse", torch.tensor([[0.0, x]]).to_sparse()),
    "a function": lambda layer, x: setattr(layer, "act", torch.relu if x > 1 else torch.tanh),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_module_holds_is_digested(change: str) -> None:
    digests = []
    for x in (1.0, 1.0, 1.5):
        model = build("llama")
        CHANGES[change](model.model.layers[1].mlp, x)
        digests.append(weights_digest(model))

    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "llama4"])
def test_a_model_that_was_saved_loaded_and_used_has_the_digest_it_had(name: str, tmp_path: Path) -> None:
    model = build(name)
    before = weights_digest(model)
    model.save_pretrained(tmp_path)

    loaded = type(model).from_pretrained(tmp_path).eval()
    plain_greedy(loaded, [1, 2, 3], 2)

    assert weights_digest(loaded) == before


def hook(layer: torch.nn.Module) -> None:
    layer.register_forward_hook(lambda module, inputs, output: output + 1)


def other_forward(layer: torch.nn.Module) -> None:
    layer.forward = lambda hidden_states: 2 * hidden_states


def offload(layer: torch.nn.Module) -> None:
    layer.to("meta")


def unreadable(layer: torch.nn.Module) -> None:
    layer.packed = memoryview(b"weights")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hook, "has a hook"),
        (other_forward, "has another forward"),
        (offload, "is not in memory"),
        (unreadable, "whose content cannot be read"),
    ],
)
def test_what_has_no_digest_is_refused(change: Callable[[torch.nn.Module], None], reason: str) -> None:
    model = build("llama")
    change(model.model.layers[1].mlp)

    with pytest.raises(UnsupportedModel, match=reason) as refused:
        weights_digest(model)

    assert "model.layers.1.mlp" in str(refused.value)
    assert "\n" not in str(refused.value)
