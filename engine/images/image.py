"""PreparedImage: an image in the form in which the model's encoder takes it, with its identity."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class ImageError(ValueError):
    """An error of an image that cannot be used; the message says why, for the user who sent it."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PreparedImage:
    """An image as the model's encoder takes it.

    Images with equal *identity* have equal pixels and grids after preprocessing, and so equal rows from the encoder.
    """

    identity: str  # hexadecimal sha256 of *inputs*
    inputs: Mapping[str, torch.Tensor]  # arguments of the model's `get_image_features`
    placeholder: Sequence[int]  # tokens that stand for the image in a prompt
    num_rows: int  # number of image tokens among them

    @property
    def num_bytes(self) -> int:
        """Bytes of the encoder's inputs."""
        return sum(tensor.nbytes for tensor in self.inputs.values())


@contextmanager
def numbered(number: int, num_images: int) -> Iterator[None]:
    """Begin the messages of `ImageError`s in the context with the image's number, if there are several images."""
    try:
        yield
    except ImageError as error:
        raise (error if num_images == 1 else ImageError(f"image {number} of {num_images}: {error}")) from error


def identity_of(inputs: Mapping[str, torch.Tensor]) -> str:
    """Return the hexadecimal sha256 of the encoder's *inputs*: names, types, shapes and bytes of all tensors."""
    total = hashlib.sha256()
    for name, tensor in sorted(inputs.items()):
        head = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        total.update(len(head).to_bytes(8, "little") + head)
        total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def plain_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
