"""A model's RMS norms on a CPU, each in one pass over memory, where torch makes five of as many operations."""

import torch
from transformers import PreTrainedModel

from kvtier.engine.model.cpu.kernel_threads import KernelThreads
from kvtier.engine.model.cpu.stand_ins import Place, StandIn, forward_of, is_plain
from kvtier.engine.model.fast_path import share_of_largest, works

WORTH_A_THREAD = 1 << 18  # numbers: 0.1 ms
TOLERANCE = 1e-5


class FusedNorm(StandIn):
    """Stands in for the `forward` of one norm."""

    def __init__(self, norm: torch.nn.Module, weight: torch.Tensor, eps: float, threads: KernelThreads) -> None:
        self._norm, self._eps, self._threads = norm, eps, threads
        self._weight = weight.detach().contiguous().numpy()

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The norm's output for *hidden_states*, [..., size]; what a kernel does not read it leaves to the norm."""
        from kvtier.engine.model.cpu.fused_kernel import normalize

        if not is_plain(hidden_states) or not hidden_states.is_contiguous():
            own: torch.Tensor = type(self._norm).forward(self._norm, hidden_states)
            return own
        output = torch.empty_like(hidden_states)
        size = len(self._weight)
        rows, written = hidden_states.view(-1, size).numpy(), output.view(-1, size).numpy()

        def share(some: slice) -> None:
            normalize(rows[some], self._weight, self._eps, written[some])

        self._threads.run_rows(share, len(rows), self._threads.worth(rows.size, WORTH_A_THREAD))
        return output


def fused_norms(model: PreTrainedModel, threads: KernelThreads) -> list[Place]:
    """Return the norms of a model that are found to compute a root mean square norm, by what they make of numbers.

    The list is empty if the kernel fails or differs on this machine.
    """
    if model.device.type != "cpu" or not works("norms in one pass", torch.float32, _error, TOLERANCE):
        return []
    places = []
    with torch.inference_mode():
        for layer in model.modules():
            fused = _fused(layer, threads)
            if fused is not None:
                places.append(forward_of(layer, fused))
    return places


def _error() -> float:
    """Return the error of the kernel against the norm's formula."""
    from kvtier.engine.model.cpu.fused_kernel import normalize

    rows, weight, eps = torch.linspace(-2, 3, 5 * 48).view(5, 48), torch.linspace(0.5, 2, 48), 1e-5
    output = torch.empty_like(rows)
    normalize(rows.numpy(), weight.numpy(), eps, output.numpy())
    return share_of_largest(output, weight * rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps))


def _fused(layer: torch.nn.Module, threads: KernelThreads) -> FusedNorm | None:
    """What may stand in for the layer, if it is a norm in float32 on a CPU; None if it computes something else."""
    weight, eps = getattr(layer, "weight", None), getattr(layer, "variance_epsilon", getattr(layer, "eps", None))
    if (
        not type(layer).__name__.endswith("RMSNorm")
        or type(weight) is not torch.nn.Parameter
        or weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or weight.ndim != 1
        or not isinstance(eps, float)
        or "forward" in vars(layer)
    ):
        return None
    numbers = torch.linspace(-2, 3, len(weight)) * torch.tensor([[1.0], [eps**0.5]])  # of the second, eps is a part
    try:
        expected = type(layer).forward(layer, numbers)
    except Exception:  # it takes other arguments, as a norm with a gate does
        return None
    for factors in (weight, 1 + weight):  # Gemma's weights are what is added to 1
        fused = FusedNorm(layer, factors, eps, threads)
        if torch.allclose(fused(numbers), expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max())):
            return fused
    return None
