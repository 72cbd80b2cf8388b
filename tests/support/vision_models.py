"""Small models that see images, with random weights, their tokenizer of bytes and their image processors."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from small_models import byte_tokenizer
from state_models import ALTERNATING, EXPERTS, LINEAR
from transformers import (
    AutoModelForImageTextToText,
    BaseImageProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
)

VOCAB = 320
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SEEN = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8}
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
SPECIAL = [
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
    *TILES,
]
FAMILIES = ("smolvlm", "qwen2_5_vl", "qwen3_vl")  # of most tests
WITH_STATES = ("qwen3_5", "qwen3_5_moe")
OF_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
IN_PROMPT = {  # what a prompt has for an image
    "smolvlm": "<image>",
    "qwen2_vl": OF_QWEN,
    "qwen2_5_vl": OF_QWEN,
    "qwen3_vl": OF_QWEN,
    "qwen3_vl_moe": OF_QWEN,
    "qwen3_5": OF_QWEN,
    "qwen3_5_moe": OF_QWEN,
}
# As models ship it: parts of a message are texts and images.
TEMPLATE = """\
{%- for m in messages %}{{ m['role'] + ':' }}
{%- if m['content'] is string %}{{ m['content'] }}{% else %}
{%- for part in m['content'] %}{% if part['type'] == 'image' %}{{ 'IMAGE' }}{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""


@dataclass(frozen=True)
class VisionModel:
    """A model that sees images, with what is needed to write prompts for it."""

    family: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    processor: BaseImageProcessor

    @property
    def in_prompt(self) -> str:
        return IN_PROMPT[self.family]

    def parts(self) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, BaseImageProcessor]:
        return self.model, self.tokenizer, self.processor


def vision_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A token for each byte, and those for images."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", IN_PROMPT[family])
    return tokenizer


def build_vision(family: str, spread: float = 0.2, width: int = 1) -> VisionModel:
    """The model of that family in float32; the same weights every time."""
    tokenizer = vision_tokenizer(family)
    token_id = tokenizer.convert_tokens_to_ids
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(_config(family, token_id), dtype=torch.float32).eval()
    torch.manual_seed(8)
    for name, weights in model.named_parameters():
        if weights.dim() >= 2:
            weights.data.normal_(0, spread if "embed" not in name else 2.5 * spread)
    model.generation_config.pad_token_id = 0
    return VisionModel(family, model, tokenizer, _processor(family))


def _config(family: str, token_id: Any) -> PreTrainedConfig:
    if family == "smolvlm":
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        return SmolVLMConfig(
            text_config={"model_type": "llama", **TEXT},
            vision_config={**vision, "image_size": 32, "patch_size": 8},
            image_token_id=token_id("<image>"),
            scale_factor=2,
            pad_token_id=None,
        )
    ids = {
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
    }
    if family in ("qwen2_vl", "qwen2_5_vl"):
        text = {key: value for key, value in TEXT.items() if key != "head_dim"}
        if family == "qwen2_vl":
            vision = {"depth": 3, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2, "patch_size": 8}
            return Qwen2VLConfig(text_config={**text, "rope_parameters": ROPE}, vision_config=vision, **ids)
        vision = {**SEEN, "window_size": 32, "fullatt_block_indexes": [1], "spatial_merge_size": 2}
        return Qwen2_5_VLConfig(text_config={**text, "rope_parameters": ROPE}, vision_config=vision, **ids)
    vision = {**SEEN, "spatial_merge_size": 2, "num_position_embeddings": 64}
    if family in WITH_STATES:  # in every second layer
        text = {**TEXT, **LINEAR, "num_hidden_layers": 4, "layer_types": ALTERNATING}
        rope = {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5, "mrope_interleaved": True}
        if family == "qwen3_5_moe":
            text |= {**EXPERTS, "shared_expert_intermediate_size": 32}
        kind = Qwen3_5MoeConfig if family == "qwen3_5_moe" else Qwen3_5Config
        return kind(text_config={**text, "rope_parameters": rope}, vision_config=vision, **ids)
    vision["deepstack_visual_indexes"] = [0, 1]
    text = {**TEXT, "rope_parameters": {**ROPE, "mrope_interleaved": True}}
    if family == "qwen3_vl_moe":
        return Qwen3VLMoeConfig(text_config={**text, **EXPERTS}, vision_config=vision, **ids)
    return Qwen3VLConfig(text_config=text, vision_config=vision, **ids)


def _processor(family: str) -> BaseImageProcessor:
    if family == "smolvlm":
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        return SmolVLMImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(size={"shortest_edge": 256, "longest_edge": 96 * 96}, patch_size=8)


def picture(seed: int, width: int = 64, height: int = 48) -> Image.Image:
    """An image of noise, another for each seed."""
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))


def plain_answer(seen: VisionModel, text: str, images: Sequence[Image.Image], max_tokens: int) -> list[int]:
    """What plain transformers answers, given the images' pixels: its own attention, cache, encoder and positions.

    The placeholders are written into the text, as the processors of transformers do.
    """
    model, tokenizer = seen.model, seen.tokenizer
    inputs: dict[str, Any] = {}
    if images:
        processed = [_processed(seen, image) for image in images]
        pieces = text.split(_image_token(seen.family))
        assert len(pieces) == len(images) + 1, "an image token for each image"
        text = pieces[0] + "".join(placed[1] + piece for placed, piece in zip(processed, pieces[1:], strict=True))
        whole = seen.processor([list(images)] if seen.family == "smolvlm" else list(images), return_tensors="pt")
        inputs = {name: value for name, value in whole.items() if name not in ("rows", "cols")}
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    if images and seen.family != "smolvlm":
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            **inputs,
        )
    finally:
        model.set_attn_implementation(before)
    return output[0, ids.shape[1] :].tolist()


def _image_token(family: str) -> str:
    return "<image>" if family == "smolvlm" else "<|image_pad|>"


def _processed(seen: VisionModel, image: Image.Image) -> tuple[Any, str]:
    """The processor's output for one image, and the text that stands for it."""
    if seen.family == "smolvlm":
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        out = seen.processor([[image]], return_tensors="pt", return_row_col_info=True)
        rows, columns = out["rows"][0][0], out["cols"][0][0]
        marks = ("<fake_token_around_image>", "<image>", "<global-img>")
        return out, get_image_prompt_string(rows, columns, 4, *marks)
    out = seen.processor([image], return_tensors="pt")
    return out, "<|image_pad|>" * (int(out["image_grid_thw"].prod()) // 4)
