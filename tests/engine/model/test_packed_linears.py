"""PackedLinears: a model's own products, from weights in another order, while a pass runs and no longer."""

import pytest
import torch
from small_models import build

from kvtier.engine.model.digest import weights_digest
from kvtier.engine.model.packed_linears import PackedLinears, available_bytes

TOKENS = torch.arange(24).reshape(2, 12)
PLENTY = 1 << 40


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_are_the_models_own_but_for_the_order_of_sums(family: str) -> None:
    model = build(family)
    expected = model(TOKENS).logits
    packed = PackedLinears(model, PLENTY)

    with packed.on():
        logits = model(TOKENS).logits

    assert packed.num_layers == sum(type(layer) is torch.nn.Linear for layer in model.modules())
    assert torch.allclose(logits, expected, atol=1e-4)


@torch.inference_mode()
def test_between_passes_the_model_is_as_it_was() -> None:
    model = build("llama")
    packed = PackedLinears(model, PLENTY)
    with packed.on():
        model(TOKENS)

    model.lm_head.weight.zero_()

    assert not any("forward" in vars(layer) for layer in model.modules())
    assert not model(TOKENS).logits.any()


def test_a_pass_that_fails_gives_the_layers_back() -> None:
    model = build("llama")
    packed = PackedLinears(model, PLENTY)

    with pytest.raises(ZeroDivisionError), packed.on():
        raise ZeroDivisionError

    assert not any("forward" in vars(layer) for layer in model.modules())


def test_a_model_has_the_same_digest_while_another_engine_computes_with_it() -> None:
    model = build("llama")
    packed, digest = PackedLinears(model, PLENTY), weights_digest(model)

    with packed.on():
        assert weights_digest(model) == digest


def test_without_room_for_the_copies_there_are_none() -> None:
    assert PackedLinears(build("llama"), 1 << 10).num_layers == 0


def test_what_stands_in_for_a_layers_forward_already_stays() -> None:
    model = build("llama")
    model.lm_head.forward = model.lm_head.forward
    packed = PackedLinears(model, PLENTY)

    with packed.on():
        assert "forward" in vars(model.model.layers[0].mlp.up_proj)
    assert "forward" in vars(model.lm_head)


def test_memory_that_is_available_is_less_than_the_machine_has() -> None:
    assert 0 < available_bytes() < 1 << 50
