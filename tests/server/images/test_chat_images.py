"""Clients of OpenAI and Anthropic send images, and get the answers of plain transformers about them."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from anthropic_client import ask, client_of
from PIL import Image
from serving import MODEL, ServerInThread, serving, tables
from small_models import build
from vision_models import FAMILIES, VisionModel, build_vision, picture, plain_answer

from kvtier.engine.config import as_config
from kvtier.server.plan import make_plan

NUM_NEW = 6
SIZE = (96, 80)


def file_of(image: Image.Image, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, form, **({"lossless": True} if form == "WEBP" else {}))
    return file.getvalue()


def data_url(image: Image.Image, form: str = "PNG") -> str:
    return f"data:image/{form.lower()};base64,{base64.b64encode(file_of(image, form)).decode()}"


def image_part(image: Image.Image) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_url(image), "detail": "high"}}


def image_block(image: Image.Image) -> dict[str, object]:
    data = base64.b64encode(file_of(image)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


# The other one has experts, and recurrent states in addition to keys and values.
BOTH = pytest.mark.parametrize("seen", ["qwen3_vl", "qwen3_5_moe"], indirect=True, scope="module")


@pytest.fixture(scope="module", params=["qwen3_vl"])
def seen(request: pytest.FixtureRequest) -> VisionModel:
    return build_vision(request.param)


@pytest.fixture(scope="module")
def server(seen: VisionModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerInThread]:
    folder = tmp_path_factory.mktemp("seeing")
    for part in seen.parts():
        part.save_pretrained(folder)
    config = tables() | {"images": {"max_per_prompt": 3, "max_pixels": 40_000}}
    with serving(str(folder), config, tokenizer=seen.tokenizer) as address:
        yield address


def expected(seen: VisionModel, text: str, *images: Image.Image) -> str:
    return seen.tokenizer.decode(plain_answer(seen, text, images, NUM_NEW), skip_special_tokens=True)


def chat(server: ServerInThread, content: object, **others: object) -> openai.types.chat.ChatCompletion:
    return server.openai().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": content}],
        max_tokens=NUM_NEW,
        temperature=0,
        extra_body={"ignore_eos": True, **others},
    )


@BOTH
def test_openais_client_asks_about_two_images_among_texts(seen: VisionModel, server: ServerInThread) -> None:
    first, second = picture(1, *SIZE), picture(2, 64, 48)
    content = [{"type": "text", "text": "This "}, image_part(first), {"type": "text", "text": " or "}]

    done = chat(server, [*content, image_part(second)])

    written = f"user:This {seen.in_prompt} or {seen.in_prompt}\nassistant:"
    assert done.choices[0].message.content == expected(seen, written, first, second)


def test_the_second_question_about_an_image_is_a_hit_and_another_image_is_not(server: ServerInThread) -> None:
    def asked(seed: int, question: str) -> int:
        done = chat(server, [image_part(picture(seed, *SIZE)), {"type": "text", "text": question}])
        return done.usage.prompt_tokens_details.cached_tokens

    before = server.ask(lambda core: core.images.statistics().num_encoded)
    cold, again, other = asked(31, "What is it?"), asked(31, "Who made it?"), asked(32, "What is it?")

    assert server.ask(lambda core: core.images.statistics().num_encoded) - before == 2
    assert again >= 30
    assert max(cold, other) < 16


@BOTH
def test_anthropics_client_sends_an_image_and_counts_its_tokens(seen: VisionModel, server: ServerInThread) -> None:
    image = picture(3, *SIZE)
    messages = [{"role": "user", "content": [image_block(image), {"type": "text", "text": "What?"}]}]

    done = ask(server, NUM_NEW, messages=messages)
    counted = client_of(server).messages.count_tokens(model=MODEL, messages=messages)

    assert done.content[0].text == expected(seen, f"user:{seen.in_prompt}What?\nassistant:", image)
    used = done.usage
    total = used.input_tokens + (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)
    assert counted.input_tokens == total


@BOTH
def test_a_tool_result_and_the_responses_api_may_have_images(seen: VisionModel, server: ServerInThread) -> None:
    image = picture(4, *SIZE)
    content = [{"type": "input_text", "text": "See "}, {"type": "input_image", "image_url": data_url(image)}]

    done = server.openai().responses.create(
        model=MODEL, input=[{"role": "user", "content": content}], max_output_tokens=NUM_NEW, temperature=0
    )

    assert done.output_text == expected(seen, f"user:See {seen.in_prompt}\nassistant:", image)


@pytest.mark.parametrize("form", ["PNG", "GIF", "WEBP"])
def test_files_of_several_kinds_are_read(form: str, seen: VisionModel, server: ServerInThread) -> None:
    image = picture(5, *SIZE) if form != "GIF" else picture(5, *SIZE).convert("P")

    done = chat(server, [{"type": "image_url", "image_url": {"url": data_url(image, form)}}])

    assert done.choices[0].message.content == expected(seen, f"user:{seen.in_prompt}\nassistant:", image.convert("RGB"))


def test_of_an_animation_the_first_frame_is_seen(seen: VisionModel, server: ServerInThread) -> None:
    first, file = picture(6, *SIZE).convert("P"), io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=[picture(seed, *SIZE).convert("P") for seed in range(7, 12)])
    url = f"data:image/gif;base64,{base64.b64encode(file.getvalue()).decode()}"

    done = chat(server, [{"type": "image_url", "image_url": {"url": url}}])

    assert done.choices[0].message.content == expected(seen, f"user:{seen.in_prompt}\nassistant:", first.convert("RGB"))


def test_tokenize_counts_each_token_of_an_image(server: ServerInThread) -> None:
    messages = [{"role": "user", "content": [image_part(picture(1, *SIZE))]}]

    told = server.post("/tokenize", json={"messages": messages}).json()
    done = chat(server, messages[0]["content"])

    assert told["count"] == len(told["tokens"]) == done.usage.prompt_tokens


def test_explain_knows_the_image(server: ServerInThread) -> None:
    def hits(seed: int) -> int:
        content = [image_part(picture(seed, *SIZE)), {"type": "text", "text": "What is to be seen here?"}]
        if seed == 21:
            chat(server, content)
        body = {"messages": [{"role": "user", "content": content}]}
        (found,) = server.post("/v1/kvtier/explain", json=body).json()["data"]
        return sum(row["end"] - row["start"] for row in found["rows"] if row["hit"] is not None)

    seen_before, other = hits(21), hits(22)

    assert seen_before >= 48
    assert other < 16


def test_a_breakpoint_behind_an_image_keeps_the_image(server: ServerInThread) -> None:
    image = image_block(picture(41, 96, 96)) | {"cache_control": {"type": "ephemeral"}}
    content = [{"type": "text", "text": "Some words before."}, image, {"type": "text", "text": "What?"}]

    done = ask(server, messages=[{"role": "user", "content": content}])
    again = ask(server, messages=[{"role": "user", "content": content}])

    assert done.usage.cache_creation_input_tokens >= 48
    assert again.usage.cache_read_input_tokens >= 48


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.com/a.png", "image URLs are switched off here; send the image's file as a data URL"),
        ("http://127.0.0.1/a.png", "image URLs are switched off here"),
        ("file:///etc/passwd", "image URLs are switched off here"),
        ("data:image/png,plain", r"the data URL is not written as data:image/png;base64,…"),
        ("data:image/png;base64,AA*A", "the image is not base64"),
        ("data:image/png;base64,AAAA", "the file is not a PNG, JPEG, WebP or GIF image"),
        (data_url(picture(1, 201, 200)), "the image has 201x200 pixels, and images.max_pixels is 40000"),
        (data_url(Image.new("1", (1, 30_000))), "1x30000 pixels; one side may be at most 200 times as long"),
        (data_url(picture(1))[:-4000], "the image cannot be prepared for the model: image file is truncated"),
    ],
)
def test_an_image_that_cannot_be_used_is_a_400_that_says_why(server: ServerInThread, url: str, why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why) as raised:
        chat(server, [{"type": "image_url", "image_url": {"url": url}}])

    assert raised.value.param == "messages"
    assert server.ask(lambda core: core.images.statistics().waiting_bytes) == 0


def test_the_image_that_cannot_be_used_is_named_by_its_number(server: ServerInThread) -> None:
    broken = {"type": "image_url", "image_url": {"url": data_url(picture(2))[:-4000]}}
    with pytest.raises(openai.BadRequestError, match="image 2 of 3: the image cannot be prepared"):
        chat(server, [image_part(picture(1)), broken, image_part(picture(3))])


def test_too_many_images_are_refused_before_any_is_decoded(server: ServerInThread) -> None:
    with pytest.raises(openai.BadRequestError, match=r"has 4 images, and images\.max_per_prompt is 3; send fewer"):
        chat(server, [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}] * 4)


def test_a_prompt_with_images_is_not_truncated(server: ServerInThread) -> None:
    with pytest.raises(openai.BadRequestError, match="a prompt with images cannot be truncated"):
        chat(server, [image_part(picture(1))], truncate_prompt_tokens=8)


def test_an_image_too_long_for_the_context_is_refused_with_its_length(seen: VisionModel, tmp_path: Path) -> None:
    for part in seen.parts():
        part.save_pretrained(tmp_path)
    with (
        serving(str(tmp_path), tables(max_prompt_tokens=20), tokenizer=seen.tokenizer) as server,
        pytest.raises(openai.BadRequestError, match=r"the prompt has \d+ tokens, and server.max_prompt_tokens is 20"),
    ):
        chat(server, [image_part(picture(1, *SIZE))])


def test_a_model_that_reads_only_text_says_so() -> None:
    with serving(build("llama"), tables()) as server:
        with pytest.raises(openai.BadRequestError, match="the model reads only text; leave the images out"):
            chat(server, [image_part(picture(1))])
        with pytest.raises(Exception, match="the model reads only text"):
            ask(server, messages=[{"role": "user", "content": [image_block(picture(1))]}])


def test_while_images_of_others_take_all_memory_a_client_is_told_to_try_again(
    seen: VisionModel, tmp_path: Path
) -> None:
    for part in seen.parts():
        part.save_pretrained(tmp_path)
    with serving(str(tmp_path), tables() | {"images": {"waiting": 0}}, tokenizer=seen.tokenizer) as server:
        with pytest.raises(openai.RateLimitError, match=r"images\.waiting is 0 B; try again later") as raised:
            chat(server, [image_part(picture(1))])
        assert raised.value.response.headers["retry-after"] == "1"
        assert chat(server, "a text").usage.completion_tokens == NUM_NEW


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_of_a_server_is_that_of_the_models_text_layers(family: str, tmp_path: Path) -> None:
    seen = build_vision(family)
    for part in seen.parts():
        part.save_pretrained(tmp_path)

    plan = make_plan(str(tmp_path), as_config(tables()), None)

    assert plan.refusals == []
    assert plan.block_bytes == 2 * 3 * 2 * 16 * 4 * 16
