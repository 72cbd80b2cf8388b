"""The namespace of kvtier's own engine: every field is what the model, its weights and the configuration say."""

from collections.abc import Callable, Mapping

import pytest
import torch
from small_models import build, byte_tokenizer
from transformers import PreTrainedModel

from kvtier.engine.build_core import build_core
from kvtier.engine.config import as_config
from kvtier.engine.model.digest import config_digest, weights_digest
from kvtier.engine.model.runner import ModelRunner
from kvtier.tiers.naming.namespace import Namespace

BLOCK_SIZE = 16


def tables(**more: Mapping[str, object]) -> dict[str, object]:
    return {"device": {"capacity": "320KiB", "block_size": BLOCK_SIZE}, "host": {"capacity": "16MiB"}, **more}


def namespace(model: PreTrainedModel, /, **more: Mapping[str, object]) -> bytes:
    with build_core(model, byte_tokenizer(), as_config(tables(**more))) as core:
        return core.namespace


def test_a_namespace_has_what_the_model_and_the_names_are() -> None:
    model, block_size = build("gemma3").to(torch.bfloat16), 32
    runner = ModelRunner(model, block_size, 1 << 20)
    found = runner.namespace("sha256", "a seed")
    runner.close()

    config, layers = model.config, range(model.config.num_hidden_layers)
    sliding = [layer for layer in layers if config.layer_types[layer] == "sliding_attention"]
    assert found == Namespace(
        model="gemma3_text",
        config_digest=config_digest(config),
        weights_digest=weights_digest(model),
        dtype="torch.bfloat16",
        geometry=found.geometry,
        block_size=block_size,
        hash_algorithm="sha256",
        hash_seed="a seed",
    )
    kinds = {"SlidingWindow": tuple(sliding), "FullAttention": tuple(layer for layer in layers if layer not in sliding)}
    assert {group.kind.partition("(")[0]: group.layer_ids for group in found.geometry} == kinds
    assert f"window_tokens={config.sliding_window}" in str([group.kind for group in found.geometry])
    assert {group.parts for group in found.geometry} == {((config.num_key_value_heads, config.head_dim),) * 2}


def other_weights(model: PreTrainedModel) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)


def other_configuration(model: PreTrainedModel) -> None:
    model.config.rms_norm_eps = 1e-3


CHANGES: dict[str, Callable[[PreTrainedModel], object]] = {
    "weights": other_weights,
    "configuration": other_configuration,
    "type": lambda model: model.to(torch.bfloat16),
}
OPTIONS: dict[str, dict[str, Mapping[str, object]]] = {
    "algorithm": {"names": {"algorithm": "sha256_cbor", "seed": "kvtier"}},
    "seed": {"names": {"seed": "a secret"}},
    "block size": {"device": {"capacity": "320KiB", "block_size": 32}},
}
HARMLESS: dict[str, dict[str, Mapping[str, object]]] = {
    "sizes": {"device": {"capacity": "640KiB", "block_size": BLOCK_SIZE}, "host": {"capacity": "8MiB"}},
    "schedule": {"scheduler": {"prefill_chunk": 64, "max_running": 3, "load": "always"}},
    "sampling": {"model": {"generation_config": "none"}},
    "the seed that is taken without one": {"names": {"seed": "kvtier"}},
    "retention": {"device": {"capacity": "320KiB", "block_size": BLOCK_SIZE, "partial_blocks": False}},
}


@pytest.fixture(scope="module")
def plain() -> bytes:
    return namespace(build("llama"))


@pytest.mark.parametrize("what", CHANGES)
def test_another_model_is_another_namespace(plain: bytes, what: str) -> None:
    model = build("llama")
    CHANGES[what](model)

    assert namespace(model) != plain


@pytest.mark.parametrize("what", OPTIONS)
def test_names_of_another_kind_are_another_namespace(plain: bytes, what: str) -> None:
    assert namespace(build("llama"), **OPTIONS[what]) != plain


@pytest.mark.parametrize("what", HARMLESS)
def test_what_decides_no_byte_is_the_same_namespace(plain: bytes, what: str) -> None:
    assert namespace(build("llama"), **HARMLESS[what]) == plain
