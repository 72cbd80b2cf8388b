"""Families of models that see images: which tokens stand for an image, and which positions the prompt's tokens have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Types of models, as their configurations name them.
MROPE_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
TILED_TYPES = frozenset({"smolvlm"})
# Refused: the tokens of an image attend to each other in both directions.
TWO_WAY_TYPES = frozenset({"gemma3", "gemma4", "gemma4_unified"})
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_PIXELS = "pixel_values"
_GRID = "image_grid_thw"


class Family(Protocol):
    """The properties of a family of models that kvtier needs and that the model's own code does not compute."""

    @property
    def processor_options(self) -> Mapping[str, Any]:
        """Arguments of the image processor."""

    @property
    def check_options(self) -> Mapping[str, Any]:
        """Further arguments of the image processor that make a small image take few tokens, for the check at load."""

    def inputs(self, processed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the encoder's inputs for one image, given the output of the image processor."""

    def placeholder(self, processed: Mapping[str, Any]) -> list[int]:
        """Return the tokens that stand for one image in a prompt, given the output of the image processor."""

    def positions(
        self, token_ids: Sequence[int], grids: Sequence[Mapping[str, torch.Tensor]]
    ) -> tuple[torch.Tensor, int] | None:
        """Return the positions of a prompt's tokens, [3, num_tokens], and an offset for the tokens after the prompt.

        A token after the prompt has its index plus the offset as its position. *grids* are the inputs of the prompt's
        images. Returns None if all tokens have their plain positions.
        """


@dataclass(frozen=True, slots=True)
class MropeFamily:
    """Qwen-VL and Qwen3.5: one image token per merged patch, and positions in time, height and width (M-RoPE)."""

    model: PreTrainedModel
    processor_options: ClassVar[Mapping[str, Any]] = NO_OPTIONS
    check_options: ClassVar[Mapping[str, Any]] = NO_OPTIONS

    def inputs(self, processed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {_PIXELS: processed[_PIXELS].to(self.model.dtype), _GRID: processed[_GRID]}

    def placeholder(self, processed: Mapping[str, Any]) -> list[int]:
        merge = self.model.config.vision_config.spatial_merge_size
        return [self.model.config.image_token_id] * (int(processed[_GRID].prod()) // merge**2)

    def positions(
        self, token_ids: Sequence[int], grids: Sequence[Mapping[str, torch.Tensor]]
    ) -> tuple[torch.Tensor, int] | None:
        ids = torch.tensor([token_ids])
        is_image = (ids == self.model.config.image_token_id).int()
        positions, delta = self.model.model.get_rope_index(
            ids, mm_token_type_ids=is_image, image_grid_thw=torch.cat([each[_GRID] for each in grids])
        )
        return positions[:, 0], int(delta)


@dataclass(frozen=True, slots=True)
class TiledFamily:
    """SmolVLM: an image is cut into rows and columns of tiles, each with a number of image tokens and a tag."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    processor_options: ClassVar[Mapping[str, Any]] = MappingProxyType({"return_row_col_info": True})
    check_options: ClassVar[Mapping[str, Any]] = MappingProxyType({"do_image_splitting": False})

    def inputs(self, processed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        pixels = processed[_PIXELS].to(self.model.dtype)
        kept = {_PIXELS: pixels} | {key: processed[key] for key in ("pixel_attention_mask",) if key in processed}
        if not pixels.flatten(2).any(dim=2).all():
            # The model takes such a tile for padding, and would compute fewer rows than the prompt has image tokens.
            raise ValueError("a tile of the image has only zeros as pixels; send another image")
        return kept

    def placeholder(self, processed: Mapping[str, Any]) -> list[int]:
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        config, named = self.model.config, self.tokenizer
        text = get_image_prompt_string(  # type: ignore[no-untyped-call]  # untyped in transformers
            processed["rows"][0][0],
            processed["cols"][0][0],
            (config.vision_config.image_size // config.vision_config.patch_size) ** 2 // config.scale_factor**2,
            fake_token_around_image=getattr(named, "fake_image_token", "<fake_token_around_image>"),
            image_token=getattr(named, "image_token", "<image>"),
            global_image_token=getattr(named, "global_image_token", "<global-img>"),
        )
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids

    def positions(
        self, token_ids: Sequence[int], grids: Sequence[Mapping[str, torch.Tensor]]
    ) -> tuple[torch.Tensor, int] | None:
        return None


def family_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Family | None:
    """Return the family of a model that sees images; None if kvtier does not know one for this model."""
    kind = model.config.model_type
    if kind in MROPE_TYPES:
        return MropeFamily(model)
    if kind in TILED_TYPES:
        return TiledFamily(model, tokenizer)
    return None
