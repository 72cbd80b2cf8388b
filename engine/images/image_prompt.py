"""ImagePrompt, a prompt with images as a caller gives it, and the prompt that is made of it."""

from __future__ import annotations  # so that help() shows the names of types, not what they stand for

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.engine.images.prompt_images import PromptImages

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt with images, for a model that sees images.

    *prompt* is a text or token ids. It contains the model's own image token once for each of the *images*, in their
    order, such as `<image>` (SmolVLM) or `<|vision_start|><|image_pad|><|vision_end|>` (Qwen-VL).
    """

    prompt: str | Sequence[int]
    images: Sequence[Image]


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """The tokens of a prompt, in which each image has as many tokens as the model needs, and the images."""

    token_ids: Sequence[int]
    images: PromptImages | None = None
