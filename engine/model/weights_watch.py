"""WeightsWatch: detects changes to a model's weights or modules, after which cached KV blocks no longer match."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvtier.engine.model.digest import LOOKING, config_digest, find_hook_or_forward

NUM_SAMPLES = 16  # of each tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

_HARMLESS = (*LOOKING, "kvtier.")  # hooks of kvtier's caches and adapters, which are set and removed at any time

Mark = tuple[int, int]  # a tensor's data address and version counter


class WeightsWatch:
    """A detector of changes to a model since the watch was created.

    `change` detects modules that were replaced, and tensors that were replaced, moved, cast or written to in place. To
    detect writes, it reads torch's counters, but torch does not count writes through `.data` or numpy.

    `sampled_change` makes more checks. It also detects hooks, added tensors or modules, and changes of the
    configuration. To detect uncounted writes, it compares a few elements of each tensor. Uncounted writes to other
    elements stay undetected, and so do changes of attributes that are not tensors.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._modules = list(model.modules())
        self._parts = list(_parts(model))
        tensors = {id(part): (name, part) for _, _, name, part in self._parts if isinstance(part, torch.Tensor)}
        self._tensors = [(name, tensor, _mark(tensor)) for name, tensor in tensors.values()]
        self._sampled = [
            (name, tensor, _places(tensor)) for name, tensor in tensors.values() if _can_be_sampled(tensor)
        ]
        self._samples = self._take()
        self._config = self._config_digest()

    @property
    def is_training(self) -> bool:
        """True if any module is in training mode, in which dropout changes results."""
        return any(module.training for module in self._modules)

    def change(self) -> str | None:
        """Return a description of a change, or None. Takes 0.1 ms for a model of 270 tensors."""
        for holder, key, name, part in self._parts:
            if holder.get(key) is not part:
                return f"{name} was replaced"
        for name, tensor, mark in self._tensors:
            if _mark(tensor) != mark:
                return f"{name} was changed"
        return None

    def sampled_change(self) -> str | None:
        """Return a description of a change, or None, after more checks than `change`. Takes about 2 ms.

        The additional checks look for hooks, added tensors or modules, another configuration, and other values of
        sampled elements.
        """
        return self.change() or self._change_of_code() or self._change_of_samples()

    def _change_of_code(self) -> str | None:
        for name, module in self._model.named_modules():
            if (code := find_hook_or_forward(module, _HARMLESS)) is not None:
                return f"{name or 'the model'} has {code} now"
        if sum(1 for _ in _parts(self._model)) != len(self._parts):
            return "parameters, buffers or modules were added to it"
        return None if self._config_digest() == self._config else "its configuration was changed"

    def _change_of_samples(self) -> str | None:
        taken = self._take()
        changed = (i for i, (before, now) in enumerate(zip(self._samples, taken, strict=True)) if before != now)
        return next((f"{self._sampled[i][0]} was changed" for i in changed), None)

    @torch.no_grad()
    def _take(self) -> list[bytes]:
        """Return the bytes of each tensor's sampled elements. Samples of one device and dtype are copied together."""
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for i, (_, tensor, _) in enumerate(self._sampled):
            groups[tensor.device, tensor.dtype].append(i)
        samples = [b""] * len(self._sampled)
        for indices in groups.values():
            pieces = [torch.take(self._sampled[i][1].detach(), self._sampled[i][2]) for i in indices]
            raw: bytes = torch.cat(pieces).cpu().view(torch.uint8).numpy().tobytes()
            start = 0
            for i, piece in zip(indices, pieces, strict=True):
                samples[i] = raw[start : start + piece.nbytes]
                start += piece.nbytes
        return samples

    def _config_digest(self) -> str:
        config = getattr(self._model, "config", None)
        return "" if config is None else config_digest(config)


def _parts(model: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, str, Any]]:
    """Yield each parameter, buffer and submodule: the dict that holds it, its key there, its full name, and itself."""
    for prefix, module in model.named_modules():
        own = vars(module)
        for holder in (own["_parameters"], own["_buffers"], own["_modules"]):
            for key, part in tuple(holder.items()):  # another thread may change it meanwhile
                yield holder, key, f"{prefix}.{key}" if prefix else key, part


def _mark(tensor: torch.Tensor) -> Mark:
    try:
        return tensor.data_ptr(), tensor._version  # noqa: SLF001  torch documents this private name
    except RuntimeError:  # a tensor made of inner tensors, or an inference tensor, which has no version counter
        return id(tensor), -1


def _can_be_sampled(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return type(tensor) in _PLAIN and is_dense and tensor.numel() > 0


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Return the flat indices of the elements to sample, which are spread evenly over the tensor."""
    last = tensor.numel() - 1
    spread: Sequence[int] = [i * last // (NUM_SAMPLES - 1) for i in range(NUM_SAMPLES)]
    return torch.tensor(spread, device=tensor.device)
