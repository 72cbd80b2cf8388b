"""How often does the encoder run for ten questions about one image, and what is the TTFT of the second question?

The model has the code of Qwen3-VL, with random weights: an encoder of 12 layers and a text model of 8. An image has
800x600 pixels. A question follows the image. Each first question is about a new image; its time to first token is the
baseline.
"""

import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from small_models import byte_tokenizer
from transformers import PreTrainedModel, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from bench.report import Row, arguments, publish
from kvtier.engine.images.image_prompt import ImagePrompt
from kvtier.engine.llm import LLM
from kvtier.engine.model.sampling import SamplingParams

IMAGE_ID, VIDEO_ID, START_ID, END_ID = 290, 291, 292, 293
VOCAB = 300
PATCH = 16
NUM_QUESTIONS = 10
MAX_RATIO = 0.2  # of the second question's time to first token to the first one's
ONE_TOKEN = SamplingParams(max_tokens=1)
TEXT = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
}
SEEN = {
    "depth": 12,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_heads": 8,
    "out_hidden_size": 512,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [3, 6, 9],
}


@dataclass(frozen=True)
class Times:
    """Seconds to the first token of questions about one image."""

    first: float  # the image is new
    second: float  # its blocks are on the device
    elsewhere: float  # another text precedes the image, so that only the encoder's result is found


def small_model() -> PreTrainedModel:
    """Return a model with the code of Qwen3-VL and random weights."""
    ids: Any = {
        "image_token_id": IMAGE_ID,
        "video_token_id": VIDEO_ID,
        "vision_start_token_id": START_ID,
        "vision_end_token_id": END_ID,
    }
    torch.manual_seed(7)
    config: Any = Qwen3VLConfig(text_config=TEXT, vision_config=SEEN, **ids)
    return Qwen3VLForConditionalGeneration(config).eval()


def opened(model: PreTrainedModel, store: Path) -> LLM:
    """Return an engine with a disk tier in *store*."""
    config = {
        "device": {"capacity": "512MiB", "block_size": 16},
        "host": {"capacity": "512MiB"},
        "disk": {"path": str(store), "capacity": "1GiB"},
    }
    processor = Qwen2VLImageProcessorPil(patch_size=PATCH, size={"shortest_edge": 4096, "longest_edge": 1 << 20})
    return LLM(model, config, byte_tokenizer(), image_processor=processor)


def picture(seed: int, width: int) -> Image.Image:
    """Return an image of noise, in the ratio 4 to 3."""
    height = width * 3 // 4
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))


def ttft_s(llm: LLM, before: str, image: Image.Image, question: str) -> float:
    """Return the seconds to the first token of an answer."""
    prompt = [*before.encode(), START_ID, IMAGE_ID, END_ID, *question.encode()]
    (done,) = llm.generate(ImagePrompt(prompt, [image]), ONE_TOKEN)
    return done.ttft_s


def num_encoded(llm: LLM) -> int:
    """Return how often the encoder has run."""
    images = llm.statistics().images
    assert images is not None, "the model sees images"
    return images.num_encoded


def measure(model: PreTrainedModel, folder: Path, num_images: int, width: int) -> list[Row]:
    """Ask about new images, about one image ten times, and about it again after a restart."""
    times: list[Times] = []
    with opened(model, folder) as llm:
        ttft_s(llm, "", picture(0, width), "A first pass of all code.")
        for seed in range(1, 1 + num_images):
            image = picture(seed, width)
            times.append(
                Times(
                    ttft_s(llm, "", image, "What is to be seen here?"),
                    ttft_s(llm, "", image, "Who has drawn this, and when?"),
                    ttft_s(llm, "Another page came before this one.", image, "What is to be seen here?"),
                )
            )
        before, asked = num_encoded(llm), picture(99, width)
        for number in range(NUM_QUESTIONS):
            ttft_s(llm, "", asked, f"Question {number}?")
        runs = num_encoded(llm) - before
    with opened(model, folder) as llm:
        restarted = ttft_s(llm, "", asked, "And after a restart?")
        runs_restarted = num_encoded(llm)
    first, second = statistics.median(each.first for each in times), statistics.median(each.second for each in times)
    ratio = statistics.median(each.second / each.first for each in times)
    elsewhere = statistics.median(each.elsewhere / each.first for each in times)
    return [
        Row(f"encoder runs, an image asked about {NUM_QUESTIONS} times", runs, "", "1", runs == 1),
        Row("encoder runs, asked again after a restart", runs_restarted, "", "0", runs_restarted == 0),
        Row("TTFT of the first question", 1e3 * first, "ms"),
        Row("TTFT of the second question", 1e3 * second, "ms"),
        Row("TTFT second / first", ratio, "", f"<= {MAX_RATIO:g}", ratio <= MAX_RATIO, varies=True),
        Row("TTFT with another text before the image / first", elsewhere, ""),
        Row("TTFT after a restart / first", restarted / first, ""),
    ]


def main() -> None:
    """Measure in a store of its own, and publish the rows."""
    options = arguments(__doc__ or "").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(
            small_model(), Path(folder) / "store", options.effort.of(7, quick=1), options.effort.of(800, 160)
        )
    publish("images", rows, options.json)


if __name__ == "__main__":
    main()
