"""Linear layers that compute from packed weights: the same results, only in a pass, only where there is room."""

import pytest
import torch
from small_models import build

from kvtier.engine.model.digest import weights_digest
from kvtier.engine.model.packed_linears import PackedLinear, PackedLinears, available_bytes
from kvtier.engine.model.runner import Chunk, ModelRunner

ROOMY = 1 << 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 24), (1, 33, 24), (700, 24)])
def test_a_packed_layer_gives_what_the_layer_gives(dtype: torch.dtype, has_bias: bool, shape: tuple[int, ...]) -> None:
    layer, rows = torch.nn.Linear(24, 40, bias=has_bias, dtype=dtype), torch.randn(shape, dtype=dtype)

    with torch.inference_mode():
        packed, plain = PackedLinear(layer)(rows), layer(rows)

    assert packed.shape == plain.shape
    assert torch.allclose(packed.float(), plain.float(), atol=1e-5 if dtype == torch.float32 else 2e-2)


def packed_layers(model: torch.nn.Module) -> int:
    return sum("forward" in vars(layer) for layer in model.modules())


def test_layers_are_packed_while_a_pass_runs_and_the_model_is_named_alike() -> None:
    model = build("llama")
    packed, digest = PackedLinears(model, ROOMY), weights_digest(model)

    with packed.on():
        during, digest_during = packed_layers(model), weights_digest(model)

    assert during == sum(type(layer) is torch.nn.Linear for layer in model.modules()) > 0
    assert digest_during == digest
    assert packed_layers(model) == 0


def test_layers_are_given_back_by_a_pass_that_fails() -> None:
    model = build("llama")
    packed = PackedLinears(model, ROOMY)

    with pytest.raises(ZeroDivisionError), packed.on():
        raise ZeroDivisionError

    assert packed_layers(model) == 0


def test_nothing_is_packed_where_the_copies_would_take_more_than_their_share_of_memory() -> None:
    model = build("llama")
    needed = sum(layer.weight.nbytes for layer in model.modules() if type(layer) is torch.nn.Linear)

    with PackedLinears(model, 8 * needed - 1).on():
        assert packed_layers(model) == 0
    with PackedLinears(model, 8 * needed).on():
        assert packed_layers(model) > 0


def test_a_layer_with_a_forward_of_its_own_keeps_it() -> None:
    model = build("llama")
    layer = model.get_output_embeddings()
    own = layer.forward = lambda rows: rows

    with PackedLinears(model, ROOMY).on():
        assert layer.forward is own

    assert layer.forward is own


def test_a_runner_computes_packed_and_has_about_the_memory_that_the_machine_has() -> None:
    model = build("llama")
    runner = ModelRunner(model, 16, 1 << 20)
    seen: list[int] = []
    layer = model.get_output_embeddings()
    hook = layer.register_forward_pre_hook(lambda *_: seen.append(packed_layers(model)))

    runner.run([Chunk([1, 2, 3], 0, [[0]])])

    hook.remove()
    runner.close()
    assert seen[0] > 0
    assert 0 < available_bytes() < ROOMY
