"""The rotary embedding of a model's queries and keys on a CPU, in one pass over memory, where torch makes ten."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from kvtier.engine.model.cpu.fused_norms import TOLERANCE, WORTH_A_THREAD
from kvtier.engine.model.cpu.kernel_threads import KernelThreads
from kvtier.engine.model.cpu.stand_ins import Place, StandIn, is_plain
from kvtier.engine.model.fast_path import share_of_largest, works

NAME = "apply_rotary_pos_emb"  # of the function, in the code of each family
Rotated = tuple[torch.Tensor, torch.Tensor]


class FusedRotation(StandIn):
    """Stands in for one family's function that rotates queries and keys."""

    def __init__(self, own: Callable[..., Rotated], threads: KernelThreads) -> None:
        self.own, self._threads = own, threads

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Rotated:
        """Queries and keys rotated, [1, num_heads, num_tokens, head_dim] float32; anything else is left to *own*."""
        angles = (cos, sin)
        if args or kwargs or not (_are_whole(q, angles) and _are_whole(k, angles)):
            return self.own(q, k, cos, sin, *args, **kwargs)
        return self._rotated(q, angles), self._rotated(k, angles)

    def _rotated(self, heads: torch.Tensor, angles: Rotated) -> torch.Tensor:
        from kvtier.engine.model.cpu.fused_kernel import rotate

        by_token = heads[0].transpose(0, 1)
        output = torch.empty_like(by_token)
        cosines, sines = (angle[0].numpy() for angle in angles)
        read, written = by_token.numpy(), output.numpy()

        def share(some: slice) -> None:
            rotate(read[some], cosines[some], sines[some], written[some])

        self._threads.run_rows(share, len(read), self._threads.worth(read.size, WORTH_A_THREAD))
        return output.transpose(0, 1).unsqueeze(0)


def fused_rotations(model: PreTrainedModel, threads: KernelThreads) -> list[Place]:
    """Return the functions that the model's attention calls, if they rotate the first half of a head with the second.

    The list is empty if the kernel fails or differs on this machine.
    """
    if model.device.type != "cpu" or not works("rotary embeddings in one pass", torch.float32, _error, TOLERANCE):
        return []
    code = {id(names): names for names in (_names_of(layer) for layer in model.modules()) if NAME in names}
    places = []
    for names in code.values():
        own = names[NAME]
        own = own.own if isinstance(own, FusedRotation) else own  # of an engine whose pass runs now
        fused = FusedRotation(own, threads)
        if _rotates_halves(fused):
            places.append(Place(names, NAME, fused, own))
    return places


def _error() -> float:
    """Return the error of the kernel against the formula of a rotation."""
    from kvtier.engine.model.cpu.fused_kernel import rotate

    heads = torch.linspace(-1, 1, 5 * 3 * 24).view(5, 3, 24)
    cosines, sines = torch.linspace(-1, 2, 2 * 5 * 24).view(2, 5, 24)
    output = torch.empty_like(heads)
    rotate(heads.numpy(), cosines.numpy(), sines.numpy(), output.numpy())
    turned = torch.cat([-heads[..., 12:], heads[..., :12]], dim=-1)
    return share_of_largest(output, heads * cosines[:, None] + turned * sines[:, None])


def _names_of(layer: torch.nn.Module) -> dict[str, Any]:
    """The names that the code of the layer's `forward` sees."""
    names: dict[str, Any] = getattr(inspect.unwrap(type(layer).forward), "__globals__", {})
    return names


def _are_whole(heads: torch.Tensor, angles: Rotated) -> bool:
    """Whether each head is rotated as a whole, all tokens lie one after the other, and a kernel can read it."""
    wanted = (1, heads.shape[2], heads.shape[3]) if heads.ndim == 4 else ()
    return (
        len(heads) == 1
        and is_plain(heads)
        and heads[0].transpose(0, 1).is_contiguous()
        and all(is_plain(angle) and angle.shape == wanted and angle.is_contiguous() for angle in angles)
    )


@torch.inference_mode()
def _rotates_halves(fused: FusedRotation) -> bool:
    """Whether both compute the same of numbers none of which is another's."""
    q, k = (torch.linspace(-1, 1, 3 * n * 8).view(1, 3, n, 8).transpose(1, 2) for n in (2, 1))
    cos, sin = torch.linspace(-1, 2, 2 * 3 * 8).view(2, 1, 3, 8)
    try:
        pairs = zip(fused(q, k, cos, sin), fused.own(q, k, cos, sin), strict=True)
        return all(torch.allclose(ours, own, atol=1e-5) for ours, own in pairs)
    except Exception:  # it takes other arguments
        return False
