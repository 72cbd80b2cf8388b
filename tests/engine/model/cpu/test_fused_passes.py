"""Norms and rotations in one pass over memory: the numbers of the model's own, and only where they are."""

import importlib

import pytest
import torch
from small_models import build
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kvtier.engine.model.cpu import fused_norms as norms
from kvtier.engine.model.cpu import fused_rotations as rotations
from kvtier.engine.model.cpu.fused_norms import fused_norms
from kvtier.engine.model.cpu.fused_rotations import FusedRotation, fused_rotations
from kvtier.engine.model.cpu.kernel_threads import KernelThreads
from kvtier.engine.model.cpu.stand_ins import StandIns

THREADS = KernelThreads(2)
TOKENS = torch.arange(24)[None]
FAMILIES = ["llama", "qwen3", "gemma3"]


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_models_own_but_for_the_order_of_sums(family: str) -> None:
    model = build(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    expected = model(TOKENS).logits
    of_norms, of_rotations = fused_norms(model, THREADS), fused_rotations(model, THREADS)

    with StandIns([*of_norms, *of_rotations]).on():
        logits = model(TOKENS).logits

    assert len(of_norms) == sum(type(layer).__name__.endswith("RMSNorm") for layer in model.modules())
    assert len(of_rotations) == 1
    assert torch.allclose(logits, expected, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_share_tokens_and_change_no_number(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (norms, rotations):
        monkeypatch.setattr(module, "WORTH_A_THREAD", 64)
    model, threads = build("llama"), KernelThreads(num_threads)
    norm, hidden = model.model.norm, torch.randn(1, 11, model.config.hidden_size)
    q, k = (torch.randn(1, 7, heads, 8).transpose(1, 2) for heads in (4, 2))
    angles = torch.randn(2, 1, 7, 8)
    (place,) = (place for place in fused_norms(model, threads) if place.names is vars(norm))
    (rotation,) = fused_rotations(model, threads)
    assert rotation.own is not None

    assert torch.allclose(place.stand_in(hidden), norm(hidden), atol=1e-6)
    for ours, own in zip(rotation.stand_in(q, k, *angles), rotation.own(q, k, *angles), strict=True):
        assert torch.allclose(ours, own, atol=1e-6)
        assert ours.shape == own.shape
    threads.close()


@torch.inference_mode()
def test_what_a_kernel_does_not_read_is_left_to_the_models_own() -> None:
    model = build("llama")
    norm = model.model.norm
    (place,) = (place for place in fused_norms(model, THREADS) if place.names is vars(norm))
    hidden = torch.randn(1, model.config.hidden_size, 5).transpose(1, 2)
    (rotation,) = fused_rotations(model, THREADS)
    assert rotation.own is not None
    by_token = [torch.randn(2, 7, heads, 8) for heads in (4, 2)]  # two sequences
    angles = torch.randn(2, 2, 7, 8)

    assert torch.equal(place.stand_in(hidden), norm(hidden))
    for ours, own in zip(
        rotation.stand_in(*by_token, *angles, unsqueeze_dim=2),
        rotation.own(*by_token, *angles, unsqueeze_dim=2),
        strict=True,
    ):
        assert torch.equal(ours, own)


def test_in_a_training_elsewhere_in_the_process_gradients_are_the_models_own() -> None:
    model = build("llama")
    places = [*fused_norms(model, THREADS), *fused_rotations(model, THREADS)]
    model(TOKENS).logits.sum().backward()
    expected = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()

    with StandIns(places).on():
        model(TOKENS).logits.sum().backward()

    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight.grad, expected)


class CenteredRMSNorm(LlamaRMSNorm):
    """Computes something else under the name of a norm."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))
        return result


class GatedRMSNorm(LlamaRMSNorm):
    """Takes something else."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(hidden_states * gate)
        return result


def test_a_norm_that_computes_something_else_stays() -> None:
    model = build("llama")
    model.model.norm = CenteredRMSNorm(model.config.hidden_size, 1e-6)
    model.model.layers[0].input_layernorm = GatedRMSNorm(model.config.hidden_size, 1e-6)

    places = [place.names for place in fused_norms(model, THREADS)]

    assert places
    for norm in (model.model.norm, model.model.layers[0].input_layernorm):
        assert all(names is not vars(norm) for names in places)


@pytest.mark.parametrize(("family", "is_fused"), [("qwen3", True), ("cohere", False), ("glm", False), ("gptj", False)])
def test_a_rotation_of_other_pairs_or_of_a_part_of_a_head_stays(family: str, is_fused: bool) -> None:
    code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    own = getattr(code, "apply_rotary_pos_emb", None) or code.apply_rotary_pos_emb_flashatt

    assert rotations._rotates_halves(FusedRotation(own, THREADS)) == is_fused  # noqa: SLF001  no model of them is small
