"""Packed layers: a model's own products, from weights in another order, while a pass runs and no longer."""

import pytest
import torch
from small_models import build

from kvtier.engine.model.cpu.packed_linears import PackedLinears, available_bytes
from kvtier.engine.model.digest import weights_digest

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


def test_without_room_for_the_copies_there_are_none() -> None:
    assert PackedLinears(build("llama"), 1 << 10).num_layers == 0


def test_a_forward_that_the_models_owner_replaced_stays() -> None:
    model = build("llama")
    model.lm_head.forward = model.lm_head.forward
    packed = PackedLinears(model, PLENTY)

    with packed.on():
        assert "forward" in vars(model.model.layers[0].mlp.up_proj)
    assert "forward" in vars(model.lm_head)


@torch.inference_mode()
def test_between_passes_the_model_is_as_it_was() -> None:
    model = build("llama")
    packed = PackedLinears(model, PLENTY)
    with packed.on():
        assert "forward" in vars(model.lm_head)
        model(TOKENS)

    model.lm_head.weight.zero_()

    assert not any("forward" in vars(layer) for layer in model.modules())
    assert not model(TOKENS).logits.any()


def test_a_pass_that_fails_gives_the_model_back() -> None:
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


def test_passes_of_two_engines_that_overlap_leave_nothing_behind() -> None:
    model = build("llama")
    early, late = PackedLinears(model, PLENTY), PackedLinears(model, PLENTY)

    with early.on():
        in_flight = late.on()
        in_flight.__enter__()
    in_flight.__exit__(None, None, None)

    assert not any("forward" in vars(layer) for layer in model.modules())


def test_memory_that_is_available_is_less_than_the_machine_has() -> None:
    assert 0 < available_bytes() < 1 << 50
