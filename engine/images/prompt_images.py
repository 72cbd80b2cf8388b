"""PromptImages: the images of one prompt, with the places of their tokens and the positions of all tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.engine.images.image import ImageError, PreparedImage
from kvtier.tiers.naming.block_hash import MultimodalItem


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image and the indices of its image tokens in the prompt, [num_rows], ascending."""

    image: PreparedImage
    places: npt.NDArray[np.int64]
    index: int  # of the image token in the prompt before the image was placed

    @property
    def end(self) -> int:
        """Index of the token after the image's last one."""
        return int(self.places[-1]) + 1

    @property
    def item(self) -> MultimodalItem:
        """The image's part in the names of blocks: from its first to its last image token."""
        first = int(self.places[0])
        return MultimodalItem(self.image.identity, first, self.end - first)

    def rows_in(self, start: int, end: int) -> range:
        """Return the indices of the image's rows whose tokens are among the prompt's tokens *start* to *end* - 1."""
        first, last = np.searchsorted(self.places, (start, end)).tolist()
        return range(first, last)


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of one prompt in order, and with M-RoPE the positions of its tokens and of those that follow."""

    placed: tuple[PlacedImage, ...]
    rope: torch.Tensor | None = None  # [3, num_prompt_tokens] int64; None: plain positions
    delta: int = 0  # added to the index of a token after the prompt to get its position

    @property
    def items(self) -> tuple[MultimodalItem, ...]:
        """The images' part in the names of the prompt's blocks."""
        return tuple(each.item for each in self.placed)

    def moved(self, num_tokens: int) -> int:
        """Return the length that the prompt's first *num_tokens* tokens have now that the images are placed."""
        return num_tokens + sum(len(each.image.placeholder) - 1 for each in self.placed if each.index < num_tokens)

    def positions(self, start: int, end: int) -> torch.Tensor | None:
        """Return the positions of the request's tokens *start* to *end* - 1, [3, num_tokens]; None for plain ones."""
        if self.rope is None:
            return None
        within, num_known = self.rope[:, start:end], self.rope.shape[1]
        after = torch.arange(max(start, num_known), max(end, num_known)) + self.delta
        return torch.cat([within, after.expand(3, -1)], dim=1)


def place_images(
    token_ids: Sequence[int], images: Sequence[PreparedImage], image_token_id: int
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Replace each image token of a prompt by the placeholder of the next image, and return tokens and placed images.

    Raises:
        ImageError: If the prompt has more or fewer image tokens than there are images.
    """
    wanted = sum(token_id == image_token_id for token_id in token_ids)
    if wanted != len(images):
        raise ImageError(
            f"the prompt has {wanted} image tokens, but {len(images)} images are given; write the model's image token "
            "once for each image, and nowhere else"
        )
    expanded: list[int] = []
    placed: list[PlacedImage] = []
    left = iter(images)
    for index, token_id in enumerate(token_ids):
        if token_id != image_token_id:
            expanded.append(token_id)
            continue
        image = next(left)
        own = np.flatnonzero(np.asarray(image.placeholder) == image_token_id)
        placed.append(PlacedImage(image, own + len(expanded), index))
        expanded += image.placeholder
    return expanded, tuple(placed)
