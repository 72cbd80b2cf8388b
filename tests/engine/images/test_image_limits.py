"""Images that cannot be used are refused with a sentence, before they take memory."""

import asyncio
import io
from typing import Any

import pytest
import torch
from PIL import Image
from small_models import build, byte_tokenizer
from transformers import AutoModelForImageTextToText, Gemma3Config
from vision_models import TEXT, VisionModel, build_vision, picture, plain_answer

from kvtier import LLM, AsyncLLM, ImagePrompt, SamplingParams
from kvtier.engine.images.families import MropeFamily

GREEDY = SamplingParams(max_tokens=2, ignore_eos=True)
TABLES: dict[str, Any] = {"device": {"capacity": "2MiB", "block_size": 16}}


@pytest.fixture(scope="module")
def seen() -> VisionModel:
    return build_vision("qwen3_vl")


def llm_of(seen: VisionModel, **images: object) -> LLM:
    model, tokenizer, processor = seen.parts()
    return LLM(model, TABLES | {"images": images}, tokenizer, image_processor=processor)


def truncated() -> Image.Image:
    file = io.BytesIO()
    picture(1, 200, 200).save(file, "PNG")
    return Image.open(io.BytesIO(file.getvalue()[: len(file.getvalue()) // 2]))


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (Image.new("1", (1, 100_000)), "1x100000 pixels; one side may be at most 200 times as long as the other"),
        (Image.new("1", (100, 81)), "100x81 pixels, and images.max_pixels is 8000; send a smaller image"),
        (Image.new("1", (0, 0)), "0x0 pixels"),
        (truncated(), "the image cannot be prepared for the model: image file is truncated"),
    ],
)
def test_an_image_that_cannot_be_used_is_one_sentence(seen: VisionModel, image: Image.Image, why: str) -> None:
    limit = 40_000 if "truncated" in why else 8_000
    with llm_of(seen, max_pixels=limit) as llm:
        with pytest.raises(ValueError, match=why):
            llm.generate(ImagePrompt(f"{seen.in_prompt}?", [image]), GREEDY)
        assert llm.statistics().images.waiting_bytes == 0
        assert llm.generate("a text", GREEDY)[0].token_ids == plain_answer(seen, "a text", [], 2)


def test_a_large_image_is_refused_before_it_is_decoded(seen: VisionModel) -> None:
    file = io.BytesIO()
    Image.new("1", (5000, 5000)).save(file, "PNG")
    image = Image.open(io.BytesIO(file.getvalue()))
    with llm_of(seen) as llm, pytest.raises(ValueError, match=r"5000x5000 pixels, and images\.max_pixels is 16777216"):
        llm.generate(ImagePrompt(seen.in_prompt, [image]), GREEDY)

    assert image.fp is not None, "the file was read to its end"


@pytest.mark.parametrize(
    ("text", "num_images", "why"),
    [
        ("{0}", 0, "the prompt has 1 image tokens, but 0 images are given"),
        ("nothing", 1, "the prompt has 0 image tokens, but 1 images are given"),
        ("{0}{0}{0}", 2, "the prompt has 3 image tokens, but 2 images are given"),
        ("{0}{0}{0}", 3, r"the prompt has 3 images, and images.max_per_prompt is 2; send fewer"),
    ],
)
def test_the_numbers_of_images_and_of_their_tokens_agree(
    seen: VisionModel, text: str, num_images: int, why: str
) -> None:
    prompt = ImagePrompt(text.format(seen.in_prompt), [picture(seed) for seed in range(num_images)])
    with llm_of(seen, max_per_prompt=2) as llm:
        if num_images:
            with pytest.raises(ValueError, match=why):
                llm.generate(prompt, GREEDY)
        else:  # a text that looks like an image is a text
            assert llm.generate(prompt, GREEDY)[0].token_ids == plain_answer(seen, prompt.prompt, [], 2)


def test_images_without_a_token_between_them_are_refused_by_models_whose_positions_need_one(seen: VisionModel) -> None:
    prompt = ImagePrompt("<|image_pad|><|image_pad|>", [picture(1), picture(2)])
    with llm_of(seen) as llm, pytest.raises(ValueError, match="put text or the model's start and end tokens"):
        llm.generate(prompt, GREEDY)


def test_a_model_that_reads_only_text_refuses_images() -> None:
    with LLM(build("llama"), TABLES, byte_tokenizer()) as llm:
        with pytest.raises(ValueError, match="the model reads only text; leave the images out"):
            llm.generate(ImagePrompt("?", [picture(1)]), GREEDY)
        assert llm.statistics().images is None


def test_gemma_3_refuses_images_because_of_its_mask_and_reads_text() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(1)
    config = Gemma3Config(
        text_config={**TEXT, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"num_hidden_layers": 4},
        vision_config={**vision, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=300,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    ids = byte_tokenizer()("a text")["input_ids"]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item()

    with LLM(model, TABLES, byte_tokenizer(), image_processor=build_vision("smolvlm").processor) as llm:
        with pytest.raises(ValueError, match="the tokens of an image attend to each other in both directions"):
            llm.generate(ImagePrompt("?", [picture(1)]), GREEDY)
        assert llm.generate("a text", GREEDY)[0].token_ids[0] == expected


def test_a_model_without_its_image_processor_refuses_images_and_reads_text(seen: VisionModel) -> None:
    with LLM(seen.model, TABLES, seen.tokenizer) as llm:
        with pytest.raises(ValueError, match=r"no image processor here; .* pass image_processor="):
            llm.generate(ImagePrompt(seen.in_prompt, [picture(1)]), GREEDY)
        assert llm.generate("a text", GREEDY)[0].token_ids == plain_answer(seen, "a text", [], 2)


def test_images_are_refused_if_their_logits_are_not_the_models_own(
    seen: VisionModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = MropeFamily.positions
    monkeypatch.setattr(MropeFamily, "positions", lambda *args: (own(*args)[0].flip(0), own(*args)[1]))

    with llm_of(seen) as llm:
        with pytest.raises(ValueError, match=r"cannot be used with images here: .* differ from its own logits by"):
            llm.generate(ImagePrompt(seen.in_prompt, [picture(1)]), GREEDY)
        assert llm.generate("a text", GREEDY)[0].token_ids == plain_answer(seen, "a text", [], 2)

    assert "images are refused" in caplog.text


def test_images_are_refused_if_the_processor_is_another_models(seen: VisionModel) -> None:
    model, tokenizer, _ = seen.parts()
    with LLM(model, TABLES, tokenizer, image_processor=build_vision("smolvlm").processor) as llm:
        with pytest.raises(ValueError, match="cannot be used with images here"):
            llm.generate(ImagePrompt(seen.in_prompt, [picture(1)]), GREEDY)
        assert llm.generate("a text", GREEDY)[0].token_ids == plain_answer(seen, "a text", [], 2)


def test_offline_prompts_wait_until_images_of_others_are_done(seen: VisionModel) -> None:
    prompts = [ImagePrompt(f"{seen.in_prompt} {seed}", [picture(seed)]) for seed in range(6)]
    with llm_of(seen, waiting=1) as llm:
        done = llm.generate(prompts, GREEDY)

    assert [each.token_ids for each in done] == [plain_answer(seen, each.prompt, each.images, 2) for each in prompts]


def test_a_caller_is_told_that_too_many_images_wait(seen: VisionModel) -> None:
    model, tokenizer, processor = seen.parts()
    tables = TABLES | {"images": {"waiting": 1}}

    async def play() -> None:
        async with AsyncLLM(model, tables, tokenizer, image_processor=processor) as llm:
            first = llm.generate(ImagePrompt(seen.in_prompt, [picture(1)]), SamplingParams(max_tokens=2000))
            await anext(first)
            with pytest.raises(ValueError, match=r"images\.waiting is 1 B; try again later"):
                await anext(llm.generate(ImagePrompt(seen.in_prompt, [picture(2)]), GREEDY))
            await first.aclose()

    asyncio.run(play())
