"""Construction of an engine's image part."""

import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from kvtier.engine.config import ImagesConfig
from kvtier.engine.images.check import check_images
from kvtier.engine.images.encoder import ImageEncoder
from kvtier.engine.images.engine_images import EngineImages, Images, NoImages
from kvtier.engine.images.families import MROPE_TYPES, TILED_TYPES, TWO_WAY_TYPES, family_of
from kvtier.engine.images.image import plain_line
from kvtier.engine.images.preparer import ImagePreparer
from kvtier.engine.images.row_cache import RowCache
from kvtier.engine.images.row_tier import RowTier
from kvtier.engine.model.errors import UnsupportedModel
from kvtier.engine.model.runner import ModelRunner
from kvtier.extras import MissingExtra, require_packages
from kvtier.tiers.naming.block_hash import Lora

if TYPE_CHECKING:
    from transformers import BaseImageProcessor

log = logging.getLogger(__name__)

TEXT_ONLY = "the model reads only text; leave the images out, or serve a model that sees images"
NO_PROCESSOR = (
    "the model has no image processor here; serve a folder with a preprocessor_config.json, or pass image_processor= "
    "with a loaded model"
)
# Errors of a processor that is another model's, or of a model that needs more than kvtier gives it.
_ERRORS = (UnsupportedModel, ValueError, TypeError, KeyError, RuntimeError, AttributeError, IndexError)
_ENCODED = "mm_encoder_outputs"  # the argument of a model's `forward` that takes the encoder's results


def open_images(
    runner: ModelRunner,
    tokenizer: PreTrainedTokenizerBase,
    processor: "BaseImageProcessor | None",
    config: ImagesConfig,
    open_rows: Callable[[int], RowTier | None],
) -> Images:
    """Return the image part of an engine, whose results with an image are compared with the model's own.

    Args:
        runner: The model.
        tokenizer: Writes the tokens that stand for an image.
        processor: The model's image processor, or None if it has none.
        config: Limits and sizes.
        open_rows: Opens the tier below the engine's memory in which the encoder's results are kept, given the bytes of
            all rows of one image token. Returns None if there is no such tier.
    """
    if (why := _why_not(runner, tokenizer, processor)) is not None:
        return NoImages(why)
    model, family = runner.model, family_of(runner.model, tokenizer)
    assert family is not None, "see _why_not"
    assert processor is not None, "see _why_not"
    preparer, encoder = ImagePreparer(model, family, processor, config), ImageEncoder(model, runner.claim)
    try:
        row_shape = check_images(runner, preparer, encoder, **family.check_options)
    except _ERRORS as error:
        why = f"the model cannot be used with images here: {plain_line(error)}"
        log.warning("images are refused: %s", why)
        return NoImages(why)
    if row_shape is None:
        return NoImages("device.capacity holds fewer tokens than a prompt with a small image; raise it")
    depth, width = row_shape
    rows = open_rows(depth * width * model.dtype.itemsize) if config.disk else None
    adapters = _adapters_of_encoder(runner)
    return EngineImages(preparer, encoder, RowCache(config.cache), rows, row_shape, model.dtype, adapters)


def _adapters_of_encoder(runner: ModelRunner) -> frozenset[Lora]:
    """Return the adapters that have a layer outside of the decoder and the output layer."""
    model = runner.model
    behind = (model.get_decoder(), model.get_output_embeddings())
    prefixes = tuple(name for name, module in model.named_modules() if module in behind)
    return frozenset(
        key for key, adapter in runner.adapters.items() if not all(each.startswith(prefixes) for each in adapter.deltas)
    )


def _why_not(
    runner: ModelRunner, tokenizer: PreTrainedTokenizerBase, processor: "BaseImageProcessor | None"
) -> str | None:
    """Return the reason why the engine cannot have images, or None."""
    model = runner.model
    if family_of(model, tokenizer) is None:
        if getattr(model.config, "vision_config", None) is None:
            return TEXT_ONLY
        if model.config.model_type in TWO_WAY_TYPES:
            return (
                f"in models of type {model.config.model_type}, the tokens of an image attend to each other in both "
                "directions, and kvtier's attention reads only earlier tokens; leave the images out"
            )
        known = ", ".join(sorted({*MROPE_TYPES, *TILED_TYPES}))
        return f"kvtier cannot write prompts with images for models of type {model.config.model_type}; only for {known}"
    if _ENCODED not in inspect.signature(type(model).forward).parameters:
        return "images need transformers 5.24 or later; upgrade transformers"
    try:
        require_packages(["PIL"], "images", "an image in a prompt")
    except MissingExtra as error:
        return str(error)
    return NO_PROCESSOR if processor is None else None
