"""A prompt with images gets the tokens of plain transformers, wherever its blocks and its images' rows come from."""

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_sidecar import started_sidecar
from family_coverage import is_attached
from image_coverage import push_down
from lora_adapters import save_adapter
from vision_models import FAMILIES, VisionModel, build_vision, picture, plain_answer
from waiting import wait_for

from kvtier import LLM, AsyncLLM, ImagePrompt, SamplingParams
from kvtier.engine.async_engine import StreamChunk
from kvtier.engine.observability.metrics.collector import EngineCollector
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.tiers.naming.tier import Tier

NUM_NEW = 8
GREEDY = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
BLOCK_SIZE = 16
BLOCK_BYTES = 2 * 3 * 2 * 16 * 4 * BLOCK_SIZE
SIZE = (96, 80)


# Most tests run with one family; `make test-slow` runs them with all.
@pytest.fixture(
    params=[
        pytest.param(family, marks=[] if family == "qwen3_vl" else [pytest.mark.slow], id=family) for family in FAMILIES
    ]
)
def seen(request: pytest.FixtureRequest) -> VisionModel:
    return build_vision(request.param)


def tables(folder: Path, num_blocks: int = 64, num_in_host: int = 64) -> dict[str, Any]:
    return {
        "device": {"capacity": num_blocks * BLOCK_BYTES, "block_size": BLOCK_SIZE},
        "host": {"capacity": num_in_host * BLOCK_BYTES},
        "disk": {"path": str(folder / "store"), "capacity": "64MiB", "read_timeout_s": 60.0},
        "scheduler": {"prefill_chunk": 24, "token_budget": 48, "load": "always"},
    }


def llm_of(seen: VisionModel, config: Mapping[str, Any]) -> LLM:
    model, tokenizer, processor = seen.parts()
    return LLM(model, config, tokenizer, image_processor=processor)


def asked(seen: VisionModel, seed: int, question: str = "what is it?") -> ImagePrompt:
    return ImagePrompt(f"Look at this: {seen.in_prompt}, and say {question}", [picture(seed, *SIZE)])


@pytest.mark.parametrize("seen", FAMILIES, indirect=True)
def test_tokens_are_those_of_plain_transformers_from_every_tier(seen: VisionModel, tmp_path: Path) -> None:
    prompt = asked(seen, 1)
    expected = plain_answer(seen, prompt.prompt, prompt.images, NUM_NEW)

    with llm_of(seen, tables(tmp_path, 24, 40)) as llm:
        cold = llm.generate(prompt, GREEDY)[0]
        from_device = llm.generate(prompt, GREEDY)[0]
        push_down(llm, prompt, Tier.DEVICE)
        from_host = llm.generate(prompt, GREEDY)[0]
        push_down(llm, prompt, Tier.HOST)
        from_disk = llm.generate(prompt, GREEDY)[0]
        llm.check()
        num_encoded = llm.statistics().images.num_encoded
    with llm_of(seen, tables(tmp_path, 24, 40)) as llm:
        restarted = llm.generate(prompt, GREEDY)[0]
        num_encoded_again = llm.statistics().images.num_encoded

    assert [done.token_ids for done in (cold, from_device, from_host, from_disk, restarted)] == [expected] * 5
    assert cold.tokens.recomputed == cold.tokens.num_tokens
    assert from_device.tokens.device == cold.tokens.num_tokens - 1
    assert from_host.tokens.host > 0
    assert from_disk.tokens.disk > 0
    assert restarted.tokens.disk > 0
    assert (num_encoded, num_encoded_again) == (1, 0)


def test_requests_with_and_without_images_share_steps_in_a_pool_too_small_for_all(
    seen: VisionModel, tmp_path: Path
) -> None:
    images = [picture(seed, *SIZE) for seed in range(4)]
    two = f"First {seen.in_prompt} and then {seen.in_prompt}: which one?"
    prompts = [
        asked(seen, 0),
        "no image at all, only a text of some words",
        ImagePrompt(two, [images[1], images[2]]),
        asked(seen, 3, "nothing, or else everything that comes to mind!"),
        ImagePrompt(two, [images[1], images[0]]),
    ]
    expected = [
        plain_answer(seen, each, [], NUM_NEW)
        if isinstance(each, str)
        else plain_answer(seen, str(each.prompt), each.images, NUM_NEW)
        for each in prompts
    ]

    with llm_of(seen, tables(tmp_path, 22)) as llm:
        done = [llm.generate(prompts, GREEDY) for _ in range(2)]
        llm.check()

    assert [[answer.token_ids for answer in answers] for answers in done] == [expected, expected]


def test_another_image_in_the_same_prompt_shares_only_the_blocks_before_it(seen: VisionModel, tmp_path: Path) -> None:
    first, second = asked(seen, 1), asked(seen, 2)
    with llm_of(seen, tables(tmp_path)) as llm:
        llm.generate(first, GREEDY)
        done = llm.generate(second, GREEDY)[0]
        again = llm.generate(first, GREEDY)[0]
        prepared = llm.core.images.prepare(seen.tokenizer(second.prompt)["input_ids"], second.images, None)

    assert prepared.images.items[0].offset // BLOCK_SIZE * BLOCK_SIZE == done.tokens.device
    assert done.token_ids == plain_answer(seen, second.prompt, second.images, NUM_NEW)
    assert again.token_ids == plain_answer(seen, first.prompt, first.images, NUM_NEW)
    assert done.token_ids != again.token_ids


def test_an_image_of_other_sides_but_as_many_tokens_is_another_image(tmp_path: Path) -> None:
    seen = build_vision("qwen3_vl")
    plain = picture(1, 96, 48)
    prompts = [
        ImagePrompt(f"{seen.in_prompt} what?", [plain]),
        ImagePrompt(f"{seen.in_prompt} what?", [plain.transpose(4)]),  # on its side
    ]
    with llm_of(seen, tables(tmp_path)) as llm:
        done = llm.generate(prompts, GREEDY)

    assert done[0].tokens.num_tokens == done[1].tokens.num_tokens
    assert [each.token_ids for each in done] == [
        plain_answer(seen, each.prompt, each.images, NUM_NEW) for each in prompts
    ]


def test_an_image_asked_about_ten_times_is_encoded_once(seen: VisionModel, tmp_path: Path) -> None:
    with llm_of(seen, tables(tmp_path)) as llm:
        for number in range(10):  # each with another text before the image, so that no block is found
            prompt = ImagePrompt(f"{number}. Look: {seen.in_prompt}.", [picture(5, *SIZE)])
            llm.generate(prompt, GREEDY)
        found = llm.statistics().images

    assert (found.num_encoded, found.num_from_host) == (1, 9)
    assert found.waiting_bytes == 0


def test_an_images_rows_are_found_on_disk_by_the_next_engine(seen: VisionModel, tmp_path: Path) -> None:
    before, after = (ImagePrompt(f"{word} {seen.in_prompt}.", [picture(5, *SIZE)]) for word in ("One", "Two"))
    with llm_of(seen, tables(tmp_path)) as llm:
        llm.generate(before, GREEDY)

    with llm_of(seen, tables(tmp_path)) as llm:
        done = llm.generate(after, GREEDY)[0]
        found = llm.statistics().images

    assert done.token_ids == plain_answer(seen, after.prompt, after.images, NUM_NEW)
    assert (found.num_encoded, found.num_from_disk, found.num_from_host) == (0, 1, 1)


def test_rows_that_are_damaged_on_disk_are_computed_again(tmp_path: Path) -> None:
    seen = build_vision("qwen3_vl")
    config = tables(tmp_path)
    prompt = ImagePrompt(f"One {seen.in_prompt}.", [picture(5, *SIZE)])
    with llm_of(seen, config) as llm:
        llm.generate(prompt, GREEDY)
    with LmdbStore(tmp_path / "store", 64 << 20) as store:
        keys = list(store.keys())
        places = [place for key in keys if (place := store.place(key)) is not None]
        for file, offset, num_bytes in places:
            with file.open("r+b") as slab:
                slab.seek(offset + num_bytes // 2)
                slab.write(b"damaged")

    with llm_of(seen, config) as llm:
        done = llm.generate(prompt, GREEDY)[0]
        found = llm.statistics().images

    assert done.token_ids == plain_answer(seen, prompt.prompt, prompt.images, NUM_NEW)
    assert (found.num_encoded, found.num_from_disk) == (1, 0)


def test_blocks_that_rows_push_out_of_the_disk_leave_its_index(tmp_path: Path) -> None:
    seen = build_vision("qwen3_vl")
    config = tables(tmp_path)
    config["disk"] |= {"capacity": "12MiB"}
    with llm_of(seen, config) as llm:
        for number in range(30):
            llm.generate("".join(random.Random(number).choices("abcdefgh", k=150)), GREEDY)
        assert llm.core.cache.drain.flush(60.0) == 0, "blocks without a copy on disk"
        for number in range(20):  # a prompt of fewer tokens than a block has, without its image
            llm.generate(ImagePrompt(seen.in_prompt, [picture(number, *SIZE)]), GREEDY)
        llm.core.images.flush()
        disk = llm.core.cache.lower.index.disk
        stored = [block for key in disk.walk() if (block := disk.block_of(key)) is not None]

        assert llm.statistics().images.num_encoded == 20
        assert disk.index.num_blocks == len(stored)


def test_rows_count_against_the_bytes_that_may_be_written_in_a_day(tmp_path: Path) -> None:
    seen = build_vision("qwen3_vl")
    config = tables(tmp_path)
    config["disk"] |= {"max_written_bytes_per_day": 1024}
    prompt = ImagePrompt(seen.in_prompt, [picture(5, *SIZE)])
    with llm_of(seen, config) as llm:
        llm.generate(prompt, GREEDY)
    with llm_of(seen, config) as llm:
        llm.generate(prompt, GREEDY)
        found = llm.statistics().images

    assert (found.num_encoded, found.num_from_disk) == (1, 0)


def test_tenants_share_neither_blocks_nor_rows(tmp_path: Path) -> None:
    seen = build_vision("smolvlm")
    with llm_of(seen, tables(tmp_path)) as llm:
        for salt in ("a", "b", None, "a"):
            llm.generate(asked(seen, 1), GREEDY, cache_salt=salt)
        found = llm.statistics().images

    assert found.num_encoded == 3


def test_a_reset_forgets_rows_in_host_memory_and_on_disk(tmp_path: Path) -> None:
    seen = build_vision("smolvlm")
    with llm_of(seen, tables(tmp_path)) as llm:
        llm.generate(asked(seen, 1), GREEDY)
        assert llm.reset_prefix_cache()
        llm.generate(asked(seen, 2), GREEDY)
    with llm_of(seen, tables(tmp_path)) as llm:
        llm.generate([asked(seen, 1), asked(seen, 2)], GREEDY)
        found = llm.statistics().images

    assert (found.num_encoded, found.num_from_disk) == (1, 1)


def test_a_token_that_only_looks_like_an_image_keeps_its_own_embedding(seen: VisionModel, tmp_path: Path) -> None:
    token = seen.tokenizer.convert_ids_to_tokens(seen.model.config.image_token_id)
    text = f"I wrote {token} myself"
    prompt = asked(seen, 1)

    with llm_of(seen, tables(tmp_path)) as llm:
        done = llm.generate([text, prompt], GREEDY)

    assert done[0].token_ids == plain_answer(seen, text, [], NUM_NEW)
    assert done[1].token_ids == plain_answer(seen, prompt.prompt, prompt.images, NUM_NEW)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_half_precision_take_images(seen: VisionModel, dtype: torch.dtype, tmp_path: Path) -> None:
    seen.model.to(dtype)
    with llm_of(seen, tables(tmp_path)) as llm:
        cold = llm.generate(asked(seen, 1), GREEDY)[0]
        warm = llm.generate(asked(seen, 1), GREEDY)[0]

    assert warm.token_ids == cold.token_ids
    assert warm.tokens.device == warm.tokens.num_tokens - 1


def test_a_folder_with_an_image_processor_is_served_with_images(seen: VisionModel, tmp_path: Path) -> None:
    for part in seen.parts():
        part.save_pretrained(tmp_path / "model")
    prompt = asked(seen, 1)

    with LLM(tmp_path / "model", tables(tmp_path)) as llm:
        done = llm.generate([prompt, "a text"], GREEDY)

    assert done[0].token_ids == plain_answer(seen, prompt.prompt, prompt.images, NUM_NEW)
    assert done[1].token_ids == plain_answer(seen, "a text", [], NUM_NEW)


def test_an_adapter_of_the_text_layers_works_with_images_and_one_of_the_encoder_does_not(tmp_path: Path) -> None:
    seen = build_vision("smolvlm")
    text_only = save_adapter(
        build_vision("smolvlm").model, tmp_path / "text", r=4, lora_alpha=8, target_modules=r".*text_model.*q_proj"
    )
    of_all = save_adapter(build_vision("smolvlm").model, tmp_path / "all", r=4, lora_alpha=8, target_modules=["q_proj"])
    config = tables(tmp_path) | {"lora": {"text": {"path": str(text_only)}, "all": {"path": str(of_all)}}}

    with llm_of(seen, config) as llm:
        plain = llm.generate(asked(seen, 1), GREEDY)[0]
        adapted = [llm.generate(asked(seen, 1), GREEDY, lora="text")[0] for _ in range(2)]
        with pytest.raises(ValueError, match="lora all: the adapter changes the image encoder"):
            llm.generate(asked(seen, 1), GREEDY, lora="all")

    assert adapted[0].token_ids == adapted[1].token_ids != plain.token_ids


def test_a_chat_with_images_is_written_with_the_models_template(seen: VisionModel, tmp_path: Path) -> None:
    image = picture(1, *SIZE)
    content = [{"type": "text", "text": "See "}, {"type": "image", "image": image}, {"type": "text", "text": "!"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    written = f"system:Be brief.\nuser:See {seen.in_prompt}!\nassistant:"

    with llm_of(seen, tables(tmp_path)) as llm:
        done = llm.chat(messages, GREEDY)
        text_only = llm.chat([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], GREEDY)

    assert done.token_ids == plain_answer(seen, written, [image], NUM_NEW)
    assert text_only.token_ids == plain_answer(seen, "user:Hello\nassistant:", [], NUM_NEW)


def test_chats_with_images_are_streamed_to_concurrent_callers_and_share_blocks(tmp_path: Path) -> None:
    seen = build_vision("qwen3_vl")
    model, tokenizer, processor = seen.parts()
    image = picture(1, *SIZE)

    def messages(question: str) -> list[dict[str, Any]]:
        content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]

    async def ask(llm: AsyncLLM, question: str, **options: Any) -> list[StreamChunk]:
        return [chunk async for chunk in llm.chat(messages(question), GREEDY, **options)]

    async def play() -> list[list[StreamChunk]]:
        async with AsyncLLM(model, tables(tmp_path), tokenizer, image_processor=processor) as llm:
            first = await ask(llm, "What?")
            others = await asyncio.gather(ask(llm, "Who?"), ask(llm, "Where?"), ask(llm, "What?", cache_salt="a"))
            return [first, *others]

    done = asyncio.run(play())

    for chunks, question in zip(done, ("What?", "Who?", "Where?", "What?"), strict=True):
        written = f"system:Be brief.\nuser:{seen.in_prompt}{question}\nassistant:"
        completion = chunks[-1].completion
        assert completion is not None
        assert completion.token_ids == plain_answer(seen, written, [image], NUM_NEW)
        assert "".join(chunk.text for chunk in chunks) == completion.text
    tokens = [chunks[-1].tokens for chunks in done]
    assert all(each is not None and each.device >= 48 for each in tokens[1:3])
    assert tokens[0] is not None
    assert tokens[3] is not None
    assert tokens[0].recomputed == tokens[3].recomputed == tokens[0].num_tokens


def test_a_chat_that_is_left_early_ends_its_request(tmp_path: Path) -> None:
    seen = build_vision("smolvlm")
    model, tokenizer, processor = seen.parts()
    endless = SamplingParams(max_tokens=400, ignore_eos=True)

    async def play() -> None:
        async with AsyncLLM(model, tables(tmp_path), tokenizer, image_processor=processor) as llm:
            chunks = llm.chat([{"role": "user", "content": [{"type": "image", "image": picture(1)}]}], endless)
            await anext(chunks)
            await chunks.aclose()

            assert await llm.reset_prefix_cache(), "a request still uses blocks"
            with pytest.raises(ValueError, match="unknown part 'video' of a message; give texts and images"):
                await anext(llm.chat([{"role": "user", "content": [{"type": "video", "video": "a"}]}]))

    asyncio.run(play())


def test_a_chat_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    seen = build_vision("smolvlm")
    with llm_of(seen, tables(tmp_path)) as llm:
        with pytest.raises(ValueError, match="unknown part 'video' of a message; give texts and images"):
            llm.chat([{"role": "user", "content": [{"type": "video", "video": "a"}]}])
        seen.tokenizer.chat_template = "{{ raise_exception('no users') }}"
        with pytest.raises(ValueError, match="the model's chat template rejects these messages: no users"):
            llm.chat([{"role": "user", "content": "a"}])
        seen.tokenizer.chat_template = None
        with pytest.raises(ValueError, match="the model's tokenizer has no chat template; use generate"):
            llm.chat([{"role": "user", "content": "a"}])


def test_metrics_tell_how_often_the_encoder_ran(tmp_path: Path) -> None:
    seen = build_vision("smolvlm")
    with llm_of(seen, tables(tmp_path)) as llm:
        for word in ("One", "Two"):
            llm.generate(ImagePrompt(f"{word} {seen.in_prompt}.", [picture(5, *SIZE)]), GREEDY)
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for metric in EngineCollector(llm.statistics).collect()
            for sample in metric.samples
            if "image" in sample.name
        }

    assert found[("kvtier_images_total", "encoder")] == found[("kvtier_images_total", "host")] == 1
    assert found[("kvtier_image_encoder_seconds_total",)] > 0
    assert found[("kvtier_image_cache_bytes",)] > 0
    assert found[("kvtier_image_waiting_bytes",)] == 0


def attached_to(folder: Path, socket: str) -> dict[str, Any]:
    config = tables(folder)
    return {"device": config["device"], "scheduler": config["scheduler"], "sidecar": f"unix://{socket}"}


def test_rows_in_a_sidecar_are_found_by_the_next_engine_and_by_no_other_tenant(tmp_path: Path) -> None:
    seen = build_vision("qwen3_vl")
    before, after = (ImagePrompt(f"{word} {seen.in_prompt}.", [picture(5, *SIZE)]) for word in ("One", "Two"))
    config = attached_to(tmp_path, str(tmp_path / "own.sock"))
    with started_sidecar(tmp_path, str(tmp_path / "own.sock")):
        with llm_of(seen, config) as llm:
            wait_for(lambda: is_attached(llm))
            llm.generate(before, GREEDY)
        with llm_of(seen, config) as llm:
            done = llm.generate(after, GREEDY)[0]
            own = llm.statistics().images
            llm.generate(after, GREEDY, cache_salt="another")
            other = llm.statistics().images

    assert done.token_ids == plain_answer(seen, after.prompt, after.images, NUM_NEW)
    assert (own.num_encoded, own.num_from_disk, own.num_from_host) == (0, 1, 1)
    assert (other.num_encoded, other.num_from_disk) == (1, 1)
