"""The same tokens come out whether a prompt's prefix was computed or came from device, host or disk."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from equal_answers import BLOCK_SIZE, GREEDY, NUM_NEW, NUM_TOKENS, chain_of, configuration, prompt_of, push_down
from small_models import MODELS, MORE_MODELS, build, byte_tokenizer, plain_greedy

from kvtier import LLM, SamplingParams
from kvtier.engine.model.errors import UnsupportedModel
from kvtier.engine.model.runner import Chunk, ModelRunner
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.tiers.naming.tier import Tier

ROPE = {"rope_type": "default", "rope_theta": 5e5}
FULL_GROUP = 1  # of gemma3, whose first layers slide
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA")])
DEVICES = ["cpu", CUDA]


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_nothing_reads_a_slot_that_is_not_its_own_or_not_yet_filled(name: str, device: str, tmp_path: Path) -> None:
    """Every slot that holds nothing is NaN: one foreign read, and no token would be right."""
    model = build(name, device)
    prompts = [prompt_of(seed, 100 + 37 * seed) for seed in range(6)]
    tables = configuration(tmp_path, 1.5, 3.0)
    tables["device"]["poison"] = True
    with LLM(model, tables, byte_tokenizer()) as llm:
        for _ in range(3):
            done = llm.generate(prompts, GREEDY)
            assert [answer.token_ids for answer in done] == [plain_greedy(model, prompt, NUM_NEW) for prompt in prompts]
        llm.check()
        loaded = llm.core.statistics.tokens
    assert loaded.host + loaded.disk > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*MODELS, *MORE_MODELS])
def test_logits_equal_plain_transformers_in_chunks_over_shuffled_blocks(name: str, device: str) -> None:
    model = build(name, device, spread=0.02)
    runner = ModelRunner(model, BLOCK_SIZE, 4 << 20)
    prompt = prompt_of(1)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor([prompt], device=device), use_cache=False).logits[0].float()
    model.set_attn_implementation("kvtier")
    tables = [random.Random(2).sample(range(runner.num_slots), 20) for _ in runner.groups]

    start, worst = 0, 0.0
    for num_tokens in (70, 33, 1, 100, 1, 95):
        logits = runner.run([Chunk(prompt[start : start + num_tokens], start, tables)])[0]
        start += num_tokens
        worst = max(worst, float((logits - plain[start - 1]).abs().max()))

    assert worst <= 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_the_same_cold_and_from_every_tier(name: str, device: str, tmp_path: Path) -> None:
    model = build(name, device)
    prompt = prompt_of(1)
    expected = plain_greedy(model, prompt, NUM_NEW)
    config = configuration(tmp_path, prompts_on_device=1.5, prompts_in_host=3.0)

    with LLM(model, config, byte_tokenizer()) as llm:
        cold = llm.generate(prompt, GREEDY)[0]
        from_device = llm.generate(prompt, GREEDY)[0]
        push_down(llm, prompt, Tier.DEVICE)
        from_host = llm.generate(prompt, GREEDY)[0]
        push_down(llm, prompt, Tier.HOST)
        from_disk = llm.generate(prompt, GREEDY)[0]
        llm.check()
    with LLM(model, config, byte_tokenizer()) as llm:
        restarted = llm.generate(prompt, GREEDY)[0]

    answers = [done.token_ids for done in (cold, from_device, from_host, from_disk, restarted)]
    assert answers == [expected] * 5
    hit = NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    assert (cold.tokens.recomputed, from_device.tokens.device) == (NUM_TOKENS, NUM_TOKENS - 1)
    assert from_host.tokens.host > 0
    assert from_disk.tokens.disk > 0
    assert restarted.tokens.disk == hit
    for done in (cold, from_device, from_host, from_disk, restarted):
        assert done.tokens.num_tokens == NUM_TOKENS


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_with_hits_from_all_tiers_gives_the_tokens_of_single_requests(
    name: str, device: str, tmp_path: Path
) -> None:
    model = build(name, device)
    prompts = [prompt_of(seed, num_tokens) for seed, num_tokens in enumerate((300, 211, 64, 299, 33, 160))]
    expected = [plain_greedy(model, prompt, NUM_NEW) for prompt in prompts]
    config = configuration(tmp_path, prompts_on_device=3.0, prompts_in_host=3.0)

    with LLM(model, config, byte_tokenizer()) as llm:
        cold = llm.generate(prompts, GREEDY)
        push_down(llm, prompts[0], Tier.DEVICE)
        warm = llm.generate([*prompts, prompts[0]], GREEDY)
        llm.check()

    assert [done.token_ids for done in cold] == expected
    assert [done.token_ids for done in warm] == [*expected, expected[0]]
    assert sum(done.tokens.host + done.tokens.disk for done in warm) > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_that_come_back_from_host_and_disk_are_those_that_left(
    dtype: torch.dtype, device: str, tmp_path: Path
) -> None:
    model = build("gemma3", device).to(dtype)
    prompt = prompt_of(1)
    config = configuration(tmp_path, 1.5, 2.0, bytes_per_token=1024 if dtype is torch.float32 else 512)

    with LLM(model, config, byte_tokenizer()) as llm:
        llm.generate(prompt, GREEDY)
        left = blocks_of(llm, prompt)
        push_down(llm, prompt, Tier.DEVICE)
        from_host = llm.generate(prompt, SamplingParams(max_tokens=1))[0].tokens
        from_host_bytes = blocks_of(llm, prompt)
        push_down(llm, prompt, Tier.HOST)
        from_disk = llm.generate(prompt, SamplingParams(max_tokens=1))[0].tokens
        from_disk_bytes = blocks_of(llm, prompt)

    assert from_host.host > 0
    assert from_disk.disk > 0
    for after in (from_host_bytes, from_disk_bytes):
        assert after.keys() <= left.keys()
        assert len(after) > 0
        for block, data in after.items():
            assert np.array_equal(data, left[block])


def blocks_of(llm: LLM, prompt: list[int]) -> dict[tuple[int, bytes], np.ndarray]:
    """The bytes in the device slots of a prompt's blocks."""
    found = {}
    for group_id, pool in enumerate(group.pool for group in llm.core.cache.residency.groups):
        for name in chain_of(llm, prompt).names:
            slot = pool.find(name)
            if slot is not None:
                blocks = llm.core.runner.slabs[group_id].blocks
                found[group_id, name] = blocks[slot].cpu().numpy().copy()
    return found


def test_a_changed_weight_is_another_namespace_and_never_hits(tmp_path: Path) -> None:
    model = build("llama")
    prompt = prompt_of(1)
    config = configuration(tmp_path, 2.0, 2.0)
    with LLM(model, config, byte_tokenizer()) as llm:
        llm.generate(prompt, GREEDY)
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[3, 3] += 0.5
    expected = plain_greedy(model, prompt, NUM_NEW)

    with LLM(model, config, byte_tokenizer()) as llm:
        done = llm.generate(prompt, GREEDY)[0]

    assert done.tokens.recomputed == NUM_TOKENS
    assert done.token_ids == expected


def test_another_rotary_base_is_another_namespace_although_the_weights_are_the_same(tmp_path: Path) -> None:
    model = build("llama")
    prompt = prompt_of(1)
    config = configuration(tmp_path, 2.0, 2.0)
    with LLM(model, config, byte_tokenizer()) as llm:
        llm.generate(prompt, GREEDY)
    other = type(model)(type(model.config)(**{**model.config.to_dict(), "rope_parameters": ROPE})).eval()
    other.load_state_dict(model.state_dict())
    expected = plain_greedy(other, prompt, NUM_NEW)

    with LLM(other, config, byte_tokenizer()) as llm:
        done = llm.generate(prompt, GREEDY)[0]

    assert done.tokens.recomputed == NUM_TOKENS
    assert done.token_ids == expected


def test_a_flipped_byte_on_disk_is_recomputed_and_reported(tmp_path: Path) -> None:
    model = build("gemma3")
    prompt = prompt_of(1)
    expected = plain_greedy(model, prompt, NUM_NEW)
    config = configuration(tmp_path, 2.0, 2.0)
    with LLM(model, config, byte_tokenizer()) as llm:
        llm.generate(prompt, GREEDY)
    with LmdbStore(tmp_path / "store") as store:
        keys = [key for key in store.keys() if key[-1] == FULL_GROUP]  # noqa: SIM118  # no dict
        place = store.place(keys[len(keys) // 2])
    assert place is not None
    flip(place)

    with LLM(model, config, byte_tokenizer()) as llm:
        done = llm.generate(prompt, GREEDY)[0]
        llm.check()
        statistics = llm.statistics()

    assert done.token_ids == expected
    assert statistics.cache.tiers["disk"].corrupt == {"corrupt": 1}


def flip(place: tuple[Path, int, int]) -> None:
    path, offset, _ = place
    with path.open("r+b") as file:
        file.seek(offset + 7)
        (byte,) = file.read(1)
        file.seek(offset + 7)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("Bloom", "AttentionInterface"),
        ("Mamba", "does not compute a prompt in several chunks correctly"),
        ("Llama", "changes with the length"),
    ],
)
def test_a_model_that_cannot_be_paged_is_refused_with_the_reason(factory: str, reason: str) -> None:
    import transformers

    small = {"vocab_size": 64, "hidden_size": 32}
    configs = {
        "Bloom": {"n_layer": 2, "n_head": 2},
        "Mamba": {"num_hidden_layers": 2},
        "Llama": {
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
    }
    config = getattr(transformers, f"{factory}Config")(**small, **configs[factory])
    model = getattr(transformers, f"{factory}ForCausalLM")(config)

    with pytest.raises(UnsupportedModel, match=reason) as refused:
        ModelRunner(model, BLOCK_SIZE, 1 << 20)

    assert "\n" not in str(refused.value)


@pytest.mark.long
@pytest.mark.parametrize(("retention_tokens", "hits"), [(None, [0, 300, 300]), (0, [0, 176, 300]), (64, [0, 300, 300])])
def test_sparse_retention_keeps_a_prefix_the_second_time_and_changes_no_token(
    retention_tokens: int | None, hits: list[int]
) -> None:
    """With 0 the second prompt resumes at the last block that ends 128 tokens before the end of the first."""
    model, document = build("gemma3"), prompt_of(7)
    device = {"capacity": "2MiB", "block_size": BLOCK_SIZE}
    if retention_tokens is not None:
        device["retention_tokens"] = retention_tokens
    prompts = [[*document[:300], *prompt_of(8 + i)[:20]] for i in range(3)]

    with LLM(model, {"device": device}, byte_tokenizer()) as llm:
        answers = [llm.generate(prompt, SamplingParams(max_tokens=3, ignore_eos=True))[0] for prompt in prompts]
        llm.check()

    assert [answer.token_ids for answer in answers] == [plain_greedy(model, prompt, 3) for prompt in prompts]
    assert [answer.tokens.device for answer in answers] == hits
