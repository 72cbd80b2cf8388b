"""Examines whether kvtier's engine answers rightly about images from every tier, for one type of model."""

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from family_coverage import (
    BLOCK_SIZE,
    READ_TIMEOUT_S,
    Answer,
    Coverage,
    Outcome,
    Way,
    is_attached,
    is_disk_open,
    is_found,
    kinds_of,
    sentence_of,
)
from small_models import byte_tokenizer
from tiny_families import NotBuilt, first_reason, tiny_config, tiny_model
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from vision_models import IN_PROMPT, VisionModel, build_vision, picture, plain_answer
from waiting import wait_for

from kvtier import LLM, ImagePrompt, SamplingParams, UnsupportedModel
from kvtier.engine.images.image import ImageError
from kvtier.engine.model.checkpoint import auto_class
from kvtier.tiers.naming.tier import Tier

SEEING_TYPES = tuple(sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
NUM_NEW = 6
GREEDY = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
SIZE = (96, 80)


def cover_images(family: str, folder: Path, sidecar: str) -> Coverage:
    """Return what becomes of images with this type, with files in the empty *folder* and the *sidecar* at that URL.

    If texts run but images are refused, the coverage has the kinds of the model's layers.
    """
    if family in IN_PROMPT:
        return _seen(build_vision(family), folder, sidecar)
    refused = Coverage(family, Outcome.REFUSED)
    try:
        model = tiny_model(family, auto_class(tiny_config(family)))
    except Exception as error:  # transformers' configurations and models raise errors of many types
        reason = str(error) if isinstance(error, NotBuilt) else first_reason(str(error))
        return replace(refused, outcome=Outcome.NOT_BUILT, reason=reason)
    try:
        with LLM(model, _device("8MiB", family), byte_tokenizer()) as llm:
            refused = replace(refused, kinds=kinds_of(llm))
            llm.generate(ImagePrompt([5, 6, 7], [picture(1, *SIZE)]), GREEDY)
    except UnsupportedModel as error:
        return replace(refused, reason=sentence_of(error))
    except ImageError as error:
        return replace(refused, reason=str(error).replace(f"models of type {family}", "models of this type"))
    return replace(refused, outcome=Outcome.WRONG, reason="it takes an image, and no test knows the right answer")


def _device(capacity: int | str, seed: str) -> dict[str, Any]:
    return {
        "names": {"seed": f"images of {seed}"},
        "device": {"capacity": capacity, "block_size": BLOCK_SIZE},
        "scheduler": {"prefill_chunk": 24, "token_budget": 48, "load": "always"},
    }


def _prompts(seen: VisionModel) -> list[ImagePrompt]:
    """Return three prompts; the second has two images."""
    one, two, three = (picture(seed, *SIZE) for seed in range(3))
    return [
        ImagePrompt(f"Look at this carefully: {seen.in_prompt}, and then say to me what is it?", [one]),
        ImagePrompt(f"First {seen.in_prompt}, then {seen.in_prompt}. Which?", [two, three]),
        ImagePrompt(f"Look: {seen.in_prompt}!", [three]),
    ]


def _seen(seen: VisionModel, folder: Path, sidecar: str) -> Coverage:
    """Compare the answers to prompts with images with those of plain transformers, in every way."""
    prompts = _prompts(seen)
    expected = [plain_answer(seen, str(each.prompt), each.images, NUM_NEW) for each in prompts]
    kinds, answers, faults = _answers(seen, prompts, folder, sidecar)
    for number, answer in answers:
        if list(answer.done.token_ids) != expected[number]:
            faults.setdefault(str(answer.way), f"tokens {answer.done.token_ids}, not {expected[number]}")
        elif fault := answer.fault():
            faults.setdefault(str(answer.way), fault)
    if plain_answer(seen, str(prompts[0].prompt), prompts[2].images, NUM_NEW) == expected[0]:
        faults.setdefault(str(Way.COLD), "the answer is the same about another image, so it proves nothing")
    return Coverage(seen.family, Outcome.WRONG if faults else Outcome.EQUAL, kinds=kinds, faults=faults)


def _answers(
    seen: VisionModel, prompts: list[ImagePrompt], folder: Path, sidecar: str
) -> tuple[list[str], list[tuple[int, Answer]], dict[str, str]]:
    """Ask about the first prompt in every way, and about all three in one batch.

    Returns the kinds of layers, the answers with the numbers of their prompts, and the ways in which the encoder ran
    for an image whose rows were cached.
    """
    answers: list[tuple[int, Answer]] = []
    faults: dict[str, str] = {}
    prompt = prompts[0]

    def ask(llm: LLM, way: Way, *tiers: str) -> None:
        answers.append((0, _answer(llm, prompt, way, tiers)))

    def note_encoded(llm: LLM, way: Way, limit: int) -> None:
        images = llm.statistics().images
        assert images is not None, "the model sees images"
        if images.num_encoded > limit:
            faults[str(way)] = f"the encoder ran {images.num_encoded} times, not {limit}"

    device = partial(_device, seed=seen.family)
    attached = {**device("8MiB"), "sidecar": sidecar}
    with _llm(seen, attached) as llm:
        wait_for(lambda: is_attached(llm))
        kinds = kinds_of(llm)
        num_blocks = -(-len(_placed(llm, prompt)) // BLOCK_SIZE)
        prompt_bytes = num_blocks * sum(llm.core.runner.block_bytes)
        ask(llm, Way.COLD)
        ask(llm, Way.DEVICE, "device")
        num_unkept = llm.where(prompt)["nowhere"]
        llm.check()
    with _llm(seen, attached) as llm:
        wait_for(lambda: is_found(llm, prompt, num_unkept))
        ask(llm, Way.SIDECAR, "host", "disk")
        note_encoded(llm, Way.SIDECAR, 0)
        llm.check()
    below = {
        "host": {"capacity": 6 * prompt_bytes},
        "disk": {"path": str(folder / "store"), "capacity": "256MiB", "read_timeout_s": READ_TIMEOUT_S},
    }
    with _llm(seen, {**device(2 * prompt_bytes), **below}) as llm:
        wait_for(lambda: is_disk_open(llm))
        ask(llm, Way.COLD)
        push_down(llm, prompt, Tier.DEVICE)
        ask(llm, Way.HOST, "host")
        push_down(llm, prompt, Tier.HOST)
        ask(llm, Way.DISK, "disk")
        note_encoded(llm, Way.DISK, 1)
        llm.check()
    with _llm(seen, {**device(6 * prompt_bytes), **below}) as llm:
        wait_for(lambda: is_disk_open(llm))
        ask(llm, Way.RESTART, "disk")
        note_encoded(llm, Way.RESTART, 0)
        batch = llm.generate(prompts, GREEDY, progress=False)
        for number, done in enumerate(batch):
            tiers = ["device"] if number == 0 else []
            answers.append((number, Answer(Way.BATCHED, _placed(llm, prompts[number]), done, tiers)))
        llm.check()
    return kinds, answers, faults


def _llm(seen: VisionModel, config: Mapping[str, Any]) -> LLM:
    model, tokenizer, processor = seen.parts()
    return LLM(model, config, tokenizer, image_processor=processor)


def _placed(llm: LLM, prompt: ImagePrompt) -> list[int]:
    """Return the prompt's tokens, in which each image has as many as the model needs."""
    tokens = llm.core.tokenizer(prompt.prompt)["input_ids"]
    return list(llm.core.images.prepare(tokens, prompt.images, None).token_ids)


def _answer(llm: LLM, prompt: ImagePrompt, way: Way, tiers: tuple[str, ...]) -> Answer:
    return Answer(way, _placed(llm, prompt), llm.generate(prompt, GREEDY)[0], tiers)


def push_down(llm: LLM, prompt: ImagePrompt, tier: Tier) -> None:
    """Answer other prompts until nothing of *prompt* is in *tier* or a faster one."""
    depths = {str(each): each.depth for each in Tier}
    for seed in range(60):
        found = {name for name, count in llm.where(prompt).items() if count and name in depths}
        if all(depths[name] > tier.depth for name in found):
            assert llm.core.cache.drain.flush(60.0) == 0, "blocks without a copy on disk"
            return
        llm.generate(f"{seed} " + "".join(random.Random(seed).choices("abcdefgh", k=150)), GREEDY)
    raise AssertionError(f"the prompt never left the {tier} tier")
