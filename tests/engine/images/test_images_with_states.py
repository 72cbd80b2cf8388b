"""Qwen3.5 has recurrent states and M-RoPE: prompts with images get the tokens of plain transformers."""

from pathlib import Path
from typing import Any

import pytest
from image_coverage import push_down
from test_image_answers import BLOCK_SIZE, GREEDY, NUM_NEW, SIZE, asked, llm_of
from vision_models import WITH_STATES, VisionModel, build_vision, picture, plain_answer

from kvtier import LLM, ImagePrompt
from kvtier.engine.config import as_config
from kvtier.server.plan import make_plan
from kvtier.tiers.naming.tier import Tier


# Most tests run with the dense model; `make test-slow` runs them with experts too.
@pytest.fixture(params=["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def seen(request: pytest.FixtureRequest) -> VisionModel:
    return build_vision(request.param)


def tables(folder: Path, device: str = "8MiB", host: str = "16MiB") -> dict[str, Any]:
    return {
        "device": {"capacity": device, "block_size": BLOCK_SIZE},
        "host": {"capacity": host},
        "disk": {"path": str(folder / "store"), "capacity": "64MiB", "read_timeout_s": 60.0},
        "scheduler": {"prefill_chunk": 24, "token_budget": 48, "load": "always"},
    }


@pytest.mark.parametrize("seen", WITH_STATES, indirect=True)
def test_tokens_are_those_of_plain_transformers_from_every_tier(seen: VisionModel, tmp_path: Path) -> None:
    prompt, other = asked(seen, 1), asked(seen, 2)
    expected = plain_answer(seen, prompt.prompt, prompt.images, NUM_NEW)
    expected_of_other = plain_answer(seen, other.prompt, other.images, NUM_NEW)
    config = tables(tmp_path, "1MiB", "3MiB")

    with llm_of(seen, config) as llm:
        cold = llm.generate(prompt, GREEDY)[0]
        from_device = llm.generate(prompt, GREEDY)[0]
        cold_other = llm.generate(other, GREEDY)[0]
        push_down(llm, prompt, Tier.DEVICE)
        from_host = llm.generate(prompt, GREEDY)[0]
        push_down(llm, prompt, Tier.HOST)
        from_disk = llm.generate(prompt, GREEDY)[0]
        llm.check()
    with llm_of(seen, config) as llm:
        restarted = llm.generate([prompt, other], GREEDY)
        num_encoded_again = llm.statistics().images.num_encoded
        llm.check()

    assert expected != expected_of_other
    assert [done.token_ids for done in (cold, from_device, from_host, from_disk, restarted[0])] == [expected] * 5
    assert cold_other.token_ids == restarted[1].token_ids == expected_of_other
    assert cold.tokens.recomputed == cold.tokens.num_tokens
    assert from_device.tokens.device == 64
    assert from_host.tokens.host == 64
    assert from_disk.tokens.disk == 64
    assert restarted[0].tokens.disk == 64
    assert num_encoded_again == 0


def test_two_images_and_texts_share_steps(seen: VisionModel, tmp_path: Path) -> None:
    images = [picture(seed, *SIZE) for seed in range(3)]
    two = f"First {seen.in_prompt} and then {seen.in_prompt}: which one?"
    prompts = [
        ImagePrompt(two, [images[0], images[1]]),
        "no image at all, only a text of some words",
        ImagePrompt(two, [images[0], images[2]]),
    ]
    expected = [
        plain_answer(seen, each, [], NUM_NEW)
        if isinstance(each, str)
        else plain_answer(seen, str(each.prompt), each.images, NUM_NEW)
        for each in prompts
    ]

    with llm_of(seen, tables(tmp_path)) as llm:
        done = [llm.generate(prompts, GREEDY) for _ in range(2)]
        llm.check()

    assert [[answer.token_ids for answer in answers] for answers in done] == [expected, expected]


def test_a_pool_of_two_states_takes_images(tmp_path: Path) -> None:
    seen = build_vision("qwen3_5")
    prompt = asked(seen, 1)

    with llm_of(seen, tables(tmp_path, "96KiB")) as llm:
        num_state_slots = llm.core.runner.layout.device_slots(96 << 10)[-1]
        done = llm.generate(prompt, GREEDY)[0]
        llm.check()

    assert num_state_slots == 2
    assert done.token_ids == plain_answer(seen, prompt.prompt, prompt.images, NUM_NEW)


def test_a_folder_is_served_with_its_encoder_and_without_a_processor_only_as_text(
    seen: VisionModel, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    for part in seen.parts():
        part.save_pretrained(folder)
    prompt = asked(seen, 1)

    with LLM(folder, tables(tmp_path)) as llm:
        done = llm.generate([prompt, "a text"], GREEDY)
    plan = make_plan(str(folder), as_config(tables(tmp_path)), None)
    (folder / "preprocessor_config.json").unlink()
    with LLM(folder, tables(tmp_path)) as llm:
        text = llm.generate("a text", GREEDY)[0]
        with pytest.raises(ValueError, match="the model has no image processor here"):
            llm.generate(prompt, GREEDY)

    assert plan.refusals == []
    assert done[0].token_ids == plain_answer(seen, prompt.prompt, prompt.images, NUM_NEW)
    assert done[1].token_ids == text.token_ids == plain_answer(seen, "a text", [], NUM_NEW)
