"""WeightsWatch: which changes of a model it finds, and by which look."""

from collections.abc import Callable

import pytest
import torch
from small_models import build
from transformers import PreTrainedModel

from kvtier.engine.model.digest import find_hook_or_forward
from kvtier.engine.model.weights_watch import WeightsWatch


def add_in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] += 1  # one number


def give_other_data(model: PreTrainedModel) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.clone()


def replace_a_layer(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 128, bias=False)


def scale_a_buffer(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)


@pytest.mark.parametrize(
    "change", [add_in_place, give_other_data, replace_a_layer, scale_a_buffer, PreTrainedModel.half]
)
def test_what_torch_counts_is_found_by_the_cheap_look(change: Callable[[PreTrainedModel], object]) -> None:
    model = build("llama")
    watch = WeightsWatch(model)
    model(torch.arange(20)[None])
    assert watch.change() is None

    change(model)

    assert watch.change() is not None


def test_what_torch_does_not_count_is_found_by_samples() -> None:
    model = build("llama")
    watch = WeightsWatch(model)

    model.model.layers[2].self_attn.k_proj.weight.data.mul_(1.001)

    assert watch.change() is None
    assert watch.sampled_change() == "model.layers.2.self_attn.k_proj.weight was changed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers_or_not_in_a_row_stay_as_they_are(dtype: torch.dtype) -> None:
    model = build("llama").to(dtype)
    model.lm_head.weight = torch.nn.Parameter(torch.full((64, 256), float("nan"), dtype=dtype).T)
    watch = WeightsWatch(model)

    assert watch.sampled_change() is None
    model.lm_head.weight.data[0, 0] = 1
    assert watch.sampled_change() == "lm_head.weight was changed"


def test_weights_of_inference_mode_are_watched_by_samples() -> None:
    with torch.inference_mode():
        model = build("llama")
    watch = WeightsWatch(model)
    assert watch.sampled_change() is None

    with torch.inference_mode():
        model.lm_head.weight.mul_(2)

    assert watch.sampled_change() == "lm_head.weight was changed"


def test_a_hook_that_another_thread_adds_meanwhile_ends_no_check() -> None:
    """`generate` adds and removes hooks of transformers while another thread's prompt is checked."""
    layer = torch.nn.Linear(2, 2)

    class Recorder:
        @property
        def __module__(self) -> str:  # read while the hooks are checked
            layer.register_forward_hook(lambda *_: None)
            return "transformers.utils"

        def __call__(self, *_: object) -> None:
            pass

    for _ in range(2):
        layer.register_forward_hook(Recorder())

    assert find_hook_or_forward(layer, ("transformers.",)) is None
