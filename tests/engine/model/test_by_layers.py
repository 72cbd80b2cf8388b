"""A prefix that comes from host memory layer by layer, while the rest of its prompt is being computed."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from damaged_blocks import damage_in_host
from equal_answers import GREEDY, chain_of, configuration, prompt_of, push_down
from small_models import build, byte_tokenizer, plain_greedy
from waiting import DEADLINE_S

from kvtier.engine.llm import LLM
from kvtier.engine.model import paged_model
from kvtier.engine.model.attention import IMPLEMENTATION
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.up import uploads
from kvtier.transfer import layer_gate
from kvtier.transfer.block_memory import CpuMemory
from kvtier.transfer.layer_gate import LayerGate

NUM_NEW = GREEDY.max_tokens


@pytest.fixture(autouse=True)
def _small_blocks_come_by_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "BY_LAYERS_BYTES", 0)


def without_disk(folder: Path) -> dict[str, object]:
    """An engine without a disk: blocks that leave the device are in host memory."""
    tables = configuration(folder, 1.5, 6.0)
    del tables["disk"]
    return tables


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers at which a step has waited."""
    seen: list[int] = []
    wait = LayerGate.wait

    def note(gate: LayerGate, layer: int, num_layers: int, give_up_at: float) -> None:
        seen.append(layer)
        wait(gate, layer, num_layers, give_up_at)

    monkeypatch.setattr(layer_gate.LayerGate, "wait", note)
    return seen


def test_a_layer_that_comes_after_the_wait_has_ended_is_no_wrong_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    prompt = prompt_of(1)
    tables = without_disk(tmp_path)
    tables["device"]["poison"] = True
    copy, wait, given_up = CpuMemory.to_device_layers, LayerGate.wait, threading.Event()

    def wait_in_vain(gate: LayerGate, layer: int, num_layers: int, give_up_at: float) -> None:
        wait(gate, layer, num_layers, give_up_at)
        if gate.missed and layer == num_layers - 1:  # else the copies overtake the step, and what it reads is right
            given_up.set()

    def late(memory: CpuMemory, host_slots: Sequence[int], device_slots: Sequence[int], layers: range) -> None:
        assert given_up.wait(DEADLINE_S), "computing never gave up waiting"
        copy(memory, host_slots, device_slots, layers)

    with LLM(model, tables, byte_tokenizer()) as llm:
        llm.generate(prompt, GREEDY)
        push_down(llm, prompt, Tier.DEVICE)
        monkeypatch.setattr(paged_model, "ARRIVAL_WAIT_S", 0.01)
        monkeypatch.setattr(LayerGate, "wait", wait_in_vain)
        monkeypatch.setattr(CpuMemory, "to_device_layers", late)
        done = llm.generate(prompt, GREEDY)[0]
        llm.check()

    assert done.token_ids == plain_greedy(model, prompt, NUM_NEW)


@pytest.mark.parametrize("how", ["it fails", "a block is damaged"])
def test_a_request_that_began_early_can_be_aborted_whatever_came_of_that(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    prompt = prompt_of(1)
    with LLM(model, configuration(tmp_path, 1.5, 6.0), byte_tokenizer()) as llm:
        llm.generate(prompt, GREEDY)
        llm.core.cache.drain.flush(DEADLINE_S)
        push_down(llm, prompt, Tier.DEVICE)
        core = llm.core
        free = core.cache.free_slots()
        if how == "a block is damaged":  # found on disk then: the request is parked a second time
            damage_in_host(core, chain_of(llm, prompt).names[3])
        request = core.add(prompt, GREEDY, NO_EXTRA_KEYS, time.monotonic())
        work = core.scheduler.schedule()
        while not work:
            work = core.scheduler.schedule()
        assert work[0].gate is not None
        if how == "a block is damaged":
            assert core.scheduler.settle(work) == [request]

        core.abort(request)

        while core.cache.num_in_flight:
            core.cache.wait(0.01)
        llm.check()
        assert core.cache.free_slots() == free


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_tokens_are_the_same_and_computing_began_early(name: str, tmp_path: Path, waits: list[int]) -> None:
    model = build(name)
    prompt = prompt_of(1)
    expected = plain_greedy(model, prompt, NUM_NEW)
    with LLM(model, without_disk(tmp_path), byte_tokenizer()) as llm:
        llm.generate(prompt, GREEDY)
        push_down(llm, prompt, Tier.DEVICE)
        waits.clear()
        done = llm.generate(prompt, GREEDY)[0]
        llm.check()

    assert done.tokens.host > 0
    assert done.token_ids == expected
    assert len(waits) >= model.config.num_hidden_layers
    assert model.config._attn_implementation != IMPLEMENTATION  # the engine is closed


def test_without_it_no_step_waits_at_a_layer(tmp_path: Path, waits: list[int]) -> None:
    model = build("llama")
    prompt = prompt_of(1)
    tables = without_disk(tmp_path)
    tables["scheduler"]["by_layers"] = False
    with LLM(model, tables, byte_tokenizer()) as llm:
        llm.generate(prompt, GREEDY)
        push_down(llm, prompt, Tier.DEVICE)
        done = llm.generate(prompt, GREEDY)[0]

    assert done.tokens.host > 0
    assert waits == []


def test_what_was_computed_on_a_damaged_block_counts_for_nothing(tmp_path: Path, waits: list[int]) -> None:
    """The digest is known only after computing has begun; no token of that may come out."""
    model = build("llama")
    prompt = prompt_of(1)
    expected = plain_greedy(model, prompt, NUM_NEW)
    with LLM(model, without_disk(tmp_path), byte_tokenizer()) as llm:
        llm.generate(prompt, GREEDY)
        push_down(llm, prompt, Tier.DEVICE)
        damage_in_host(llm.core, chain_of(llm, prompt).names[3])
        waits.clear()
        done = llm.generate(prompt, GREEDY)[0]
        again = llm.generate(prompt, GREEDY)[0]
        llm.check()

    assert len(waits) > 0, "computing did not begin early: this shows nothing"
    assert done.token_ids == expected
    assert again.token_ids == expected
    assert done.tokens.reasons[Reason.CORRUPT] > 0


@pytest.mark.parametrize("part", [0, 1])
def test_a_copy_that_fails_half_way_is_a_shorter_prefix(
    tmp_path: Path, waits: list[int], monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    model = build("llama")
    prompt = prompt_of(1)
    expected = plain_greedy(model, prompt, NUM_NEW)
    copy = CpuMemory.to_device_layers

    def fail(memory: CpuMemory, host_slots: list[int], device_slots: list[int], layers: range) -> None:
        if layers.start >= part:
            raise OSError("the copy failed")
        copy(memory, host_slots, device_slots, layers)

    with LLM(model, without_disk(tmp_path), byte_tokenizer()) as llm:
        llm.generate(prompt, GREEDY)
        push_down(llm, prompt, Tier.DEVICE)
        waits.clear()
        monkeypatch.setattr(CpuMemory, "to_device_layers", fail)
        done = llm.generate(prompt, GREEDY)[0]
        llm.check()

    assert len(waits) > 0
    assert done.token_ids == expected
    assert done.tokens.reasons.get(Reason.FAILED, 0) > 0
