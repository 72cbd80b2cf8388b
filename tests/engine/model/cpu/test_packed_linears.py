"""Packed layers: a model's own products, from weights in another order."""

import pytest
import torch
from small_models import build

from kvtier.engine.model.cpu.packed_linears import available_bytes, packed_linears
from kvtier.engine.model.cpu.stand_ins import StandIns

TOKENS = torch.arange(24).reshape(2, 12)
PLENTY = 1 << 40


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_are_the_models_own_but_for_the_order_of_sums(family: str) -> None:
    model = build(family)
    expected = model(TOKENS).logits
    packed = packed_linears(model, PLENTY)

    with StandIns(packed).on():
        logits = model(TOKENS).logits

    assert len(packed) == sum(type(layer) is torch.nn.Linear for layer in model.modules())
    assert torch.allclose(logits, expected, atol=1e-4)


def test_without_room_for_the_copies_there_are_none() -> None:
    assert not packed_linears(build("llama"), 1 << 10)


def test_what_stands_in_for_a_layers_forward_already_stays() -> None:
    model = build("llama")
    model.lm_head.forward = model.lm_head.forward
    packed = packed_linears(model, PLENTY)

    with StandIns(packed).on():
        assert "forward" in vars(model.model.layers[0].mlp.up_proj)
    assert "forward" in vars(model.lm_head)


def test_memory_that_is_available_is_less_than_the_machine_has() -> None:
    assert 0 < available_bytes() < 1 << 50
