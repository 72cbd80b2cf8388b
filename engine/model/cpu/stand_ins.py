"""StandIns: what computes parts of a model in place of its own functions, while a pass of the engine runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


class StandIn:
    """Computes what one function of a model's computes; a class of its own, so that it is told from a foreign one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, but for the order of sums."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a function is looked up, by name, and what stands in for it there."""

    names: dict[str, Any]  # of a module of layers, or of the Python module that a model's code is in
    name: str
    stand_in: StandIn
    own: Callable[..., Any] | None = None  # None: the name is not in *names* but for the stand-in


class StandIns:
    """The places of one model; owned by its runner."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = tuple(places)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have the model compute with them in the pass that runs meanwhile.

        Another engine's pass on the same model may see them, or end them early: either way it computes the same.
        """
        for place in self.places:
            place.names[place.name] = place.stand_in
        try:
            yield
        finally:
            for place in self.places:
                if place.own is None:
                    place.names.pop(place.name, None)
                else:
                    place.names[place.name] = place.own


def forward_of(layer: torch.nn.Module, stand_in: StandIn) -> Place:
    """The place of a layer's `forward`, which its class has."""
    return Place(vars(layer), "forward", stand_in)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether kernels can read it: float32 on a CPU, and nobody wants its gradient. A model's code may be at work
    elsewhere in the process, on another device or in training, while stand-ins are in its place.
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and not tensor.requires_grad
    )
