"""ImagePreparer: turns images into the encoder's inputs, and prompts with images into tokens. Any thread may use it."""

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from kvtier.engine.config import ImagesConfig, size_text
from kvtier.engine.images.families import Family
from kvtier.engine.images.image import ImageError, PreparedImage, identity_of, plain_line
from kvtier.engine.images.image_prompt import PreparedPrompt
from kvtier.engine.images.prompt_images import PromptImages, place_images

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import BaseImageProcessor

# Maximum ratio of an image's sides. Image processors of transformers refuse more, or make such an image unrecognizable.
MAX_RATIO = 200
# Errors of pillow for damaged files, and of image processors.
_ERRORS = (ValueError, TypeError, OSError, ArithmeticError, SyntaxError, KeyError, RuntimeError, AttributeError)


class ImagesBusy(ValueError):
    """Raised if too many bytes of prepared images wait in the engine. The caller may try again."""


class ImagePreparer:
    """Prepares images for a model's encoder, within the limits of the configuration.

    Prepared images live as long as their requests. `num_bytes` counts them.
    """

    def __init__(
        self, model: PreTrainedModel, family: Family, processor: "BaseImageProcessor", limits: ImagesConfig
    ) -> None:
        self._model = model
        self._family = family
        self._processor = processor
        self._limits = limits
        self._lock = threading.Lock()  # guards the next one
        self.num_bytes = 0  # of all prepared images that are still in use

    @property
    def image_token_id(self) -> int:
        """The token that stands for an image in a prompt before the image is placed."""
        token_id: int = self._model.config.image_token_id
        return token_id

    @property
    def has_room(self) -> bool:
        """True if the images of another prompt may be prepared now."""
        return self.num_bytes < self._limits.waiting

    def check_room(self) -> None:
        """Raise `ImagesBusy` if so many bytes of images are in use that no other prompt may bring more."""
        if not self.has_room:
            raise ImagesBusy(
                f"prepared images of other requests take {size_text(self.num_bytes)}, and images.waiting is "
                f"{size_text(self._limits.waiting)}; try again later"
            )

    def check_count(self, num_images: int) -> None:
        """Raise `ImageError` if a prompt may not have so many images."""
        if num_images > self._limits.max_per_prompt:
            raise ImageError(
                f"the prompt has {num_images} images, and images.max_per_prompt is {self._limits.max_per_prompt}; "
                "send fewer"
            )

    def check_size(self, width: int, height: int) -> None:
        """Raise `ImageError` if an image of this size in pixels is too large, too small or too narrow."""
        if min(width, height) < 1 or max(width, height) > MAX_RATIO * min(width, height):
            raise ImageError(
                f"the image has {width}x{height} pixels; one side may be at most {MAX_RATIO} times as long as the other"
            )
        if width * height > self._limits.max_pixels:
            raise ImageError(
                f"the image has {width}x{height} pixels, and images.max_pixels is {self._limits.max_pixels}; "
                "send a smaller image"
            )

    def prepare(self, image: "Image", **options: Any) -> PreparedImage:
        """Return an image as the encoder takes it. *options* are passed to the image processor.

        Raises:
            ImageError: If the image exceeds a limit, or the processor cannot use it.
        """
        self.check_size(*image.size)
        try:
            plain = image.convert("RGB")
            processed = self._processor(plain, return_tensors="pt", **self._family.processor_options, **options)
            inputs = self._family.inputs(processed)
            placeholder = self._family.placeholder(processed)
        except _ERRORS as error:
            raise ImageError(f"the image cannot be prepared for the model: {plain_line(error)}") from error
        prepared = PreparedImage(identity_of(inputs), inputs, placeholder, placeholder.count(self.image_token_id))
        self._count(prepared.num_bytes)
        weakref.finalize(prepared, self._count, -prepared.num_bytes).atexit = False
        return prepared

    def place(self, token_ids: Sequence[int], images: Sequence[PreparedImage]) -> PreparedPrompt:
        """Put *images* in the places of a prompt's image tokens.

        Raises:
            ImageError: If the numbers of images and of image tokens differ, or if two images follow each other
                without a token between them in a model that does not allow this.
        """
        self.check_count(len(images))
        try:
            expanded, placed = place_images(token_ids, images, self.image_token_id)
            if not placed:
                return PreparedPrompt(token_ids)
            rope = self._family.positions(expanded, [each.image.inputs for each in placed])
        except ImageError:
            raise
        except (ValueError, RuntimeError, StopIteration) as error:
            raise ImageError(
                f"the images cannot be placed in the prompt ({plain_line(error)}); put text or the model's start and "
                "end tokens of an image between two images"
            ) from error
        return PreparedPrompt(expanded, PromptImages(placed, *(rope or (None, 0))))

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
