"""Adapters: the tokens of plain transformers with peft, in one batch and from every tier; no two share a block."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from equal_answers import filler
from lora_adapters import ADAPTERS, ATTENTION, MLP, plain_adapted, save_adapter, save_adapters
from small_models import VOCAB, build, byte_tokenizer, plain_greedy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from waiting import wait_for

from kvtier import LLM, AsyncLLM, SamplingParams
from kvtier.engine.llm import keyed
from kvtier.engine.model.adapter_folder import UnusableLora
from kvtier.engine.model.errors import UnsupportedModel
from kvtier.engine.model.lora_adapter import load_adapter
from kvtier.engine.model.runner import Chunk, ModelRunner
from kvtier.engine.scheduling.request import Request, RequestOptions
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS, ExtraKeys, Lora
from kvtier.tiers.naming.tier import Tier

BLOCK_SIZE = 16
NUM_TOKENS = 150
NUM_NEW = 8
BLOCK_BYTES = BLOCK_SIZE * 1024  # of every small model
GREEDY = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
NAMES = [None, *ADAPTERS]
BOTH = ["llama", "gemma3"]


def prompt_of(seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Path]]:
    """The folders of the adapters, by model and name."""
    return {name: save_adapters(name, tmp_path_factory.mktemp(name)) for name in BOTH}


class Plain:
    """The answers of plain transformers and peft, for each adapter."""

    def __init__(self, folders: Mapping[str, Mapping[str, Path]]) -> None:
        self._folders = folders
        self._models: dict[tuple[str, str | None], PreTrainedModel] = {}
        self._answers: dict[tuple[str, str | None, tuple[int, ...]], list[int]] = {}

    def model(self, name: str, lora: str | None) -> PreTrainedModel:
        if (name, lora) not in self._models:
            base = build(name)
            self._models[name, lora] = base if lora is None else plain_adapted(base, self._folders[name][lora])
        return self._models[name, lora]

    def answer(self, name: str, lora: str | None, prompt: Sequence[int]) -> list[int]:
        key = name, lora, tuple(prompt)
        if key not in self._answers:
            self._answers[key] = plain_greedy(self.model(name, lora), list(prompt), NUM_NEW)
        return self._answers[key]


@pytest.fixture(scope="module")
def plain(saved: Mapping[str, Mapping[str, Path]]) -> Plain:
    return Plain(saved)


def tables(folders: Mapping[str, Path], blocks: int = 64, store: Path | None = None, host: int = 0) -> dict:
    config: dict = {
        "device": {"capacity": blocks * BLOCK_BYTES, "block_size": BLOCK_SIZE},
        "host": {"capacity": host * BLOCK_BYTES},
        "scheduler": {"prefill_chunk": 48, "token_budget": 96, "load": "always"},
        "lora": {name: {"path": str(folder)} for name, folder in folders.items()},
    }
    if store is not None:
        config["disk"] = {"path": str(store), "capacity": "64MiB"}
    return config


def add(llm: LLM, prompt: Sequence[int], lora: str | None, salt: str | None = None) -> Request:
    return llm.core.add(prompt, GREEDY, keyed(llm.core, NO_EXTRA_KEYS, lora, salt), arrived_at=0.0)


def run(llm: LLM) -> None:
    while llm.core.has_work:
        llm.core.step()
    llm.check()


def push_down(llm: LLM, prompt: Sequence[int], lora: str | None, tier: Tier) -> None:
    """Answer other prompts until nothing of *prompt* is left in *tier*."""
    warmer = {"device"} if tier is Tier.DEVICE else {"device", "host"}
    for _ in range(40):
        if not any(llm.where(prompt, lora=lora)[place] for place in warmer):
            return
        llm.generate(filler(NUM_TOKENS), GREEDY)
    raise AssertionError(f"the prompt never left the {tier} tier")


# The right tokens


@pytest.mark.parametrize("name", BOTH)
def test_a_batch_of_all_adapters_gives_the_tokens_of_plain_peft(
    name: str, saved: Mapping[str, Mapping[str, Path]], plain: Plain
) -> None:
    """Prompts and decoding of different adapters in each step, computed and with hits."""
    asked = [(prompt_of(seed, num), NAMES[seed % 4]) for seed, num in enumerate((150, 33, 97, 140, 64, 150, 16, 81))]
    expected = [plain.answer(name, lora, prompt) for prompt, lora in asked]

    with LLM(
        build(name),
        {**tables(saved[name]), "device": {"capacity": "4MiB", "block_size": 16, "poison": True}},
        byte_tokenizer(),
    ) as llm:
        for _ in range(2):
            requests = [add(llm, prompt, lora) for prompt, lora in asked]
            run(llm)
            assert [request.generated for request in requests] == expected
        hits = [request.completion().tokens.device for request in requests]

    assert hits == [len(prompt) - 1 for prompt, _ in asked]
    answers = {tuple(plain.answer(name, lora, asked[0][0])) for lora in NAMES}
    assert len(answers) == len(NAMES), "the adapters make no difference; the test says nothing"


@pytest.mark.parametrize("name", BOTH)
def test_logits_of_mixed_steps_equal_plain_peft_in_chunks(
    name: str, saved: Mapping[str, Mapping[str, Path]], plain: Plain
) -> None:
    model = build(name)
    adapters = [load_adapter(model, lora, folder) for lora, folder in saved[name].items()]
    runner = ModelRunner(model, BLOCK_SIZE, 2 << 20, adapters)
    keys = [None, *(adapter.key for adapter in adapters)]
    rng = random.Random(3)
    slots = rng.sample(range(runner.num_slots), 40)
    prompts = [prompt_of(seed) for seed in range(4)]
    own = [[slots[10 * i : 10 * i + 10]] * len(runner.groups) for i in range(4)]
    with torch.inference_mode():
        logits = [
            plain.model(name, lora)(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
            for prompt, lora in zip(prompts, NAMES, strict=True)
        ]
    done, worst = [0] * 4, 0.0

    while any(num < NUM_TOKENS for num in done):
        step = rng.sample(
            [i for i in range(4) if done[i] < NUM_TOKENS], rng.randint(1, sum(d < NUM_TOKENS for d in done))
        )
        ends = [min(NUM_TOKENS, done[i] + rng.choice([1, 1, 17, 40])) for i in step]
        got = runner.run(
            [Chunk(prompts[i][done[i] : end], done[i], own[i], lora=keys[i]) for i, end in zip(step, ends, strict=True)]
        )
        for row, (i, end) in enumerate(zip(step, ends, strict=True)):
            worst = max(worst, float((got[row] - logits[i][end - 1]).abs().max() / logits[i].abs().max()))
            done[i] = end
    runner.close()

    assert worst <= 1e-5


@pytest.mark.long
@pytest.mark.parametrize("name", BOTH)
def test_tokens_are_the_same_from_device_host_disk_and_after_a_restart(
    name: str, saved: Mapping[str, Mapping[str, Path]], plain: Plain, tmp_path: Path
) -> None:
    prompt = prompt_of(1)
    expected = plain.answer(name, "all", prompt)
    config = tables(saved[name], 24, tmp_path, 40)
    with LLM(build(name), config, byte_tokenizer()) as llm:
        cold, device = (llm.generate(prompt, GREEDY, lora="all")[0] for _ in range(2))
        push_down(llm, prompt, "all", Tier.DEVICE)
        host = llm.generate(prompt, GREEDY, lora="all")[0]
        push_down(llm, prompt, "all", Tier.HOST)
        disk = llm.generate(prompt, GREEDY, lora="all")[0]
        llm.check()
    with LLM(build(name), config, byte_tokenizer()) as llm:
        restarted = llm.generate(prompt, GREEDY, lora="all")[0]

    assert [done.token_ids for done in (cold, device, host, disk, restarted)] == [expected] * 5
    assert (cold.tokens.recomputed, device.tokens.device) == (NUM_TOKENS, NUM_TOKENS - 1)
    assert host.tokens.host > 0
    assert disk.tokens.disk > 0
    assert restarted.tokens.disk == NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE


def test_a_prompt_preempted_or_aborted_among_others_changes_no_token(
    saved: Mapping[str, Mapping[str, Path]], plain: Plain
) -> None:
    asked = [(prompt_of(seed, 60 + 11 * seed), NAMES[seed % 4]) for seed in range(6)]
    config = tables(saved["llama"], 16, host=32)
    with LLM(build("llama"), config, byte_tokenizer()) as llm:
        requests = [add(llm, prompt, lora) for prompt, lora in asked]
        urgent, was_restored = None, set()
        for step in range(200):
            llm.core.step()
            was_restored |= {requests.index(r) for r in llm.core.scheduler.waiting if r in requests and r.tokens}
            if step == 3:
                keys = keyed(llm.core, NO_EXTRA_KEYS, "mlp", None)
                urgent = llm.core.add(prompt_of(9, 140), GREEDY, keys, 0.0, RequestOptions(priority=-1))
            if step == 4:
                llm.core.abort(requests[4])
        assert not llm.core.has_work
        llm.check()
    assert urgent is not None
    assert was_restored, "no request was preempted"
    assert urgent.generated == plain.answer("llama", "mlp", prompt_of(9, 140))

    for number, (prompt, lora) in enumerate(asked):
        if number != 4:
            assert requests[number].generated == plain.answer("llama", lora, prompt), number


# Whose blocks they are


def test_no_block_is_shared_between_adapters_the_base_or_salts(saved: Mapping[str, Mapping[str, Path]]) -> None:
    prompt = prompt_of(2)
    owners = [(lora, salt) for lora in NAMES for salt in (None, "a", "b")]
    with LLM(build("llama"), tables(saved["llama"], 256), byte_tokenizer()) as llm:
        first = [llm.generate(prompt, GREEDY, lora=lora, cache_salt=salt)[0] for lora, salt in owners]
        again = [llm.generate(prompt, GREEDY, lora=lora, cache_salt=salt)[0] for lora, salt in owners]
        llm.check()

    assert {done.tokens.recomputed for done in first} == {NUM_TOKENS}
    assert {done.tokens.device for done in again} == {NUM_TOKENS - 1}
    assert [done.token_ids for done in again] == [done.token_ids for done in first]


def test_the_base_models_store_is_the_same_with_and_without_adapters(
    saved: Mapping[str, Mapping[str, Path]], plain: Plain, tmp_path: Path
) -> None:
    before, after = prompt_of(1), prompt_of(2)
    with LLM(build("llama"), tables({}, 64, tmp_path, 64), byte_tokenizer()) as llm:
        llm.generate(before, GREEDY)
    with LLM(build("llama"), tables(saved["llama"], 64, tmp_path, 64), byte_tokenizer()) as llm:
        adapted = llm.generate(before, GREEDY, lora="mlp")[0]
        found = llm.generate(before, GREEDY)[0]
        llm.generate(after, GREEDY)
    with LLM(build("llama"), tables({}, 64, tmp_path, 64), byte_tokenizer()) as llm:
        found_without = llm.generate(after, GREEDY)[0]

    assert adapted.tokens.recomputed == NUM_TOKENS
    assert found.tokens.disk == found_without.tokens.disk == NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    assert found.token_ids == plain.answer("llama", None, before)


def test_an_adapter_is_its_weights_and_scales_not_only_its_name(
    saved: Mapping[str, Mapping[str, Path]], plain: Plain, tmp_path: Path
) -> None:
    """On one store, under one name: an adapter trained on, one scaled otherwise, and a copy in another folder."""
    prompt, store = prompt_of(1), tmp_path / "store"
    settings = ADAPTERS["all"]
    versions = {
        "trained on": save_adapter(build("llama"), tmp_path / "more", 77, **settings),
        "scaled": save_adapter(build("llama"), tmp_path / "scaled", 0, **{**settings, "lora_alpha": 9}),
        "a copy": save_adapter(build("llama"), tmp_path / "copy", 0, **settings, task_type="CAUSAL_LM"),
    }
    with LLM(build("llama"), tables({"it": saved["llama"]["all"]}, 64, store, 64), byte_tokenizer()) as llm:
        llm.generate(prompt, GREEDY, lora="it")

    from_disk = {}
    for version, folder in versions.items():
        with LLM(build("llama"), tables({"it": folder}, 64, store, 64), byte_tokenizer()) as llm:
            done = llm.generate(prompt, GREEDY, lora="it")[0]
        from_disk[version] = done.tokens.disk
        assert done.token_ids == plain_greedy(plain_adapted(build("llama"), folder), prompt, NUM_NEW), version

    assert from_disk == {"trained on": 0, "scaled": 0, "a copy": NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE}


def test_the_events_of_an_adapters_blocks_have_its_name(saved: Mapping[str, Mapping[str, Path]]) -> None:
    config = {**tables(saved["llama"]), "events": {"endpoint": "inproc://lora-events"}}
    prompt = prompt_of(1, 32)
    with LLM(build("llama"), config, byte_tokenizer()) as llm, zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.connect("inproc://lora-events")
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        stored: list[dict[str, Any]] = []

        def are_told() -> bool:
            llm.generate(prompt, GREEDY, lora="ranked", cache_salt="mine")
            llm.reset_prefix_cache()
            while socket.poll(20):
                _, events, *_ = msgspec.msgpack.decode(socket.recv_multipart()[-1])
                stored.extend(event for event in events if event["type"] == "BlockStored")
            return bool(stored)

        wait_for(are_told)  # again and again: a subscriber misses what is sent before it is known

    assert {event["lora_name"] for event in stored} == {"ranked"}
    assert stored[0]["extra_keys"][0][0] == "ranked"


def test_adapters_share_nothing_with_the_names_of_vllm_either(saved: Mapping[str, Mapping[str, Path]]) -> None:
    config = {**tables(saved["llama"], 128), "names": {"algorithm": "sha256_cbor"}}
    with LLM(build("llama"), config, byte_tokenizer()) as llm:
        hits = [llm.generate(prompt_of(2), GREEDY, lora=lora)[0].tokens.device for lora in NAMES * 2]

    assert hits == [0] * 4 + [NUM_TOKENS - 1] * 4


def test_streams_of_all_adapters_at_once_get_their_own_tokens(
    saved: Mapping[str, Mapping[str, Path]], plain: Plain
) -> None:
    asked = [(prompt_of(seed, 40 + seed), NAMES[seed % 4]) for seed in range(12)]

    async def stream(llm: AsyncLLM, prompt: list[int], lora: str | None) -> list[int]:
        return [piece.token_id async for piece in llm.generate(prompt, GREEDY, lora=lora)]

    async def answers() -> list[list[int]]:
        async with AsyncLLM(build("llama"), tables(saved["llama"]), byte_tokenizer()) as llm:
            with pytest.raises(ValueError, match="lora legal: no such adapter"):
                await stream(llm, [1, 2], "legal")
            return await asyncio.gather(*(stream(llm, prompt, lora) for prompt, lora in asked))

    assert asyncio.run(answers()) == [plain.answer("llama", lora, prompt) for prompt, lora in asked]


# The model stays what it is


def test_a_model_with_adapters_that_no_request_uses_has_no_hooks_and_is_given_back_as_it_was(
    saved: Mapping[str, Mapping[str, Path]],
) -> None:
    model = build("llama")
    names = {name for name, _ in model.named_parameters()}

    def hooked() -> set[str]:
        return {name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks}

    with LLM(model, tables(saved["llama"]), byte_tokenizer()) as llm:
        at_start = hooked()
        llm.generate(prompt_of(1), GREEDY, lora="mlp")
        active = hooked()
        llm.generate(prompt_of(1), GREEDY)
        idle = hooked()
        llm.generate(prompt_of(1), GREEDY, lora="mlp")

    assert len(active) == 4 * len(ATTENTION + MLP)
    assert (at_start, idle, hooked()) == (set(), set(), set())
    assert {name for name, _ in model.named_parameters()} == names
    assert not hasattr(model, "peft_config")
    assert all(weights.requires_grad for weights in model.parameters())


def test_two_engines_on_one_model_do_not_meet(saved: Mapping[str, Mapping[str, Path]], plain: Plain) -> None:
    model, prompt = build("llama"), prompt_of(1)
    with (
        LLM(model, tables({"it": saved["llama"]["all"]}), byte_tokenizer()) as one,
        LLM(model, tables({"it": saved["llama"]["mlp"]}), byte_tokenizer()) as another,
        LLM(model, tables({}), byte_tokenizer()) as base,
    ):
        requests = [add(one, prompt, "it"), add(another, prompt, "it"), add(base, prompt, None)]
        while any(llm.core.has_work for llm in (one, another, base)):
            for llm in (one, another, base):
                llm.core.step()

    answers = [request.generated for request in requests]
    assert answers == [plain.answer("llama", lora, prompt) for lora in ("all", "mlp", None)]


# Other models and targets


def other_models() -> dict[str, tuple[PreTrainedModel, PreTrainedModel, dict[str, object]]]:
    torch.manual_seed(5)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=VOCAB, initializer_range=0.2)).eval()
    convolutions = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    experts = {"target_modules": ["q_proj", "v_proj", "shared_expert.gate_proj", "shared_expert.down_proj"]}
    return {
        "gpt2": (gpt2, deepcopy(gpt2), convolutions),
        "output layer": (build("llama"), build("llama"), {"target_modules": ["lm_head", "k_proj"]}),
        "tied output layer": (build("gemma3"), build("gemma3"), {"target_modules": ["lm_head", "v_proj"]}),
        "shared expert": (build("llama4"), build("llama4"), experts),
        "bfloat16": (build("llama").bfloat16(), build("llama").bfloat16(), {"target_modules": ATTENTION + MLP}),
    }


@pytest.mark.parametrize("kind", ["gpt2", "output layer", "tied output layer", "shared expert", "bfloat16"])
def test_other_layers_get_their_deltas_in_mixed_steps(kind: str, tmp_path: Path) -> None:
    model, twin, settings = other_models()[kind]
    saver = other_models()[kind][0]
    folder = save_adapter(saver, tmp_path, 4, r=3, **settings)
    adapter = load_adapter(model, "it", folder)
    runner = ModelRunner(model, BLOCK_SIZE, 2 << 20, [adapter])
    prompts = [prompt_of(seed, 40) for seed in range(3)]
    own = [[list(range(4 * i, 4 * i + 4))] * len(runner.groups) for i in range(3)]
    twin.set_attn_implementation("eager")
    with torch.inference_mode():
        plain = [twin(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float() for prompt in prompts]
        twin = plain_adapted(twin, folder)
        for i in (0, 2):
            plain[i] = twin(input_ids=torch.tensor([prompts[i]]), use_cache=False).logits[0].float()

    keys, num_logits = [adapter.key, None, adapter.key], [3, 1, 2]
    runner.run([Chunk(prompt[:25], 0, own[i], lora=keys[i]) for i, prompt in enumerate(prompts)])
    got = runner.run(
        [Chunk(prompt[25:], 25, own[i], lora=keys[i], num_logits=num_logits[i]) for i, prompt in enumerate(prompts)]
    )
    runner.close()

    for i, rows in enumerate(got.split(num_logits)):
        expected = plain[i][-num_logits[i] :]
        error = float((rows - expected).abs().max() / expected.abs().max())
        assert error <= (0.15 if kind == "bfloat16" else 1e-5), i  # of another row more than 1


def test_a_layer_that_gets_its_tokens_in_another_order_is_refused(saved: Mapping[str, Mapping[str, Path]]) -> None:
    """Experts do so; which token gets which delta would be left to chance."""
    model = build("llama")
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    mlp.forward = lambda hidden: plain(hidden.flip(1)).flip(1)

    with pytest.raises(UnusableLora, match=r"layers\.1\.mlp.* in another order") as refused:
        LLM(model, tables({"mlp": saved["llama"]["mlp"]}), byte_tokenizer())

    assert "\n" not in str(refused.value)


# Mistakes


def save_odd(kind: str, folder: Path) -> Path:
    more: dict[str, dict[str, object]] = {
        "dora": {"use_dora": True},
        "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
        "saved modules": {"modules_to_save": ["lm_head"]},
        "bias": {"bias": "all"},
        "lora bias": {"lora_bias": True},
        "replicated": {"layer_replication": [(0, 3), (1, 4)]},
        "changed base": {"init_lora_weights": "olora"},
        "new tokens": {"trainable_token_indices": [1]},
    }
    return save_adapter(build("llama"), folder / "odd", r=4, **{"target_modules": ["q_proj"], **more[kind]})


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dora", "use_dora = True changes more than a LoRA does"),
        ("embeddings", "model.embed_tokens is no plain LoRA"),
        ("saved modules", "modules_to_save = "),
        ("bias", "bias = 'all'"),
        ("lora bias", "layers.0.self_attn.q_proj is no plain LoRA"),
        ("replicated", "layer_replication = "),
        ("changed base", "init_lora_weights = 'olora'"),
        ("new tokens", "trainable_token_indices = "),
    ],
)
def test_an_adapter_that_is_more_than_a_lora_is_refused_with_the_reason(kind: str, reason: str, tmp_path: Path) -> None:
    folder = save_odd(kind, tmp_path)

    with pytest.raises(UnusableLora, match=reason) as refused:
        load_adapter(build("llama"), "odd", folder)

    assert str(refused.value).startswith("lora odd: ")
    assert "\n" not in str(refused.value)


def test_an_adapter_with_an_output_layer_of_its_own_is_refused(tmp_path: Path) -> None:
    """peft saves the layer with the adapter, and would load it over the base model's."""
    trained = build("llama")
    with torch.no_grad():
        trained.lm_head.weight[7] += 1
    folder = save_adapter(trained, tmp_path, target_modules=["lm_head"])

    with pytest.raises(UnusableLora, match="other weights of lm_head"):
        load_adapter(build("llama"), "odd", folder)


def llama(**changes: object) -> PreTrainedModel:
    settings = {**build("llama").config.to_dict(), **changes}
    return LlamaForCausalLM(LlamaConfig(**settings))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 2}, "another base model.*layers.[23]"),
        ({"num_hidden_layers": 6}, "another base model.*layers.[45]"),
        ({"hidden_size": 128}, "size mismatch for model.layers.0"),
        ({"num_key_value_heads": 4}, "size mismatch for model.layers.0.self_attn.[kv]_proj"),
    ],
)
def test_an_adapter_of_another_base_model_is_refused(
    changes: dict[str, object], reason: str, saved: Mapping[str, Mapping[str, Path]]
) -> None:
    with pytest.raises(UnusableLora, match=reason) as refused:
        load_adapter(llama(**changes), "all", saved["llama"]["all"])

    assert "\n" not in str(refused.value)


def test_a_folder_that_is_missing_empty_or_broken_is_refused(
    saved: Mapping[str, Mapping[str, Path]], tmp_path: Path
) -> None:
    model = build("llama")
    broken = save_adapter(build("llama"), tmp_path / "broken", **ADAPTERS["mlp"])
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    without = save_adapter(build("llama"), tmp_path / "without", **ADAPTERS["mlp"])
    (without / "adapter_model.safetensors").unlink()
    reasons = {}

    for folder in (tmp_path / "nowhere", tmp_path, broken, without):
        with pytest.raises(UnusableLora) as refused:
            load_adapter(model, "x", folder)
        reasons[folder.name] = str(refused.value)

    assert "there is no folder" in reasons["nowhere"]
    assert "is no adapter" in reasons[tmp_path.name]
    assert all("\n" not in reason and reason.startswith("lora x: ") for reason in reasons.values())


def test_an_adapter_that_is_not_there_is_the_callers_mistake(saved: Mapping[str, Mapping[str, Path]]) -> None:
    with LLM(build("llama"), tables(saved["llama"]), byte_tokenizer()) as llm:
        with pytest.raises(ValueError, match="lora legal: no such adapter; loaded: all, ranked, mlp"):
            llm.generate("text", lora="legal")
        with pytest.raises(ValueError, match="no such adapter is loaded"):
            llm.generate("text", extra=ExtraKeys(lora=Lora("all", "sha256:of another")))
        llm.check()


def test_a_model_with_peft_in_it_is_refused() -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"]))

    with pytest.raises(ValueError, match="PeftModel is not a transformers model"):
        LLM(adapted, {}, byte_tokenizer())


def test_a_folder_of_base_and_adapter_that_transformers_puts_together_is_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(str(tmp_path / "base"))
    base = LlamaForCausalLM.from_pretrained(str(tmp_path / "base"))
    folder = save_adapter(base, tmp_path / "adapter", r=2, target_modules=["q_proj"])

    with pytest.raises(UnsupportedModel, match=r"configure the adapter in \[lora\]"):
        LLM(str(folder), {}, byte_tokenizer())
