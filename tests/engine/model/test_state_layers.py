"""Recurrent and convolution states in slots: a packed step gives the logits that a request alone gives."""

import random
import threading
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from small_models import VOCAB
from state_models import FAMILIES, build_states
from tiny_families import tiny_model
from transformers import DynamicCache, PreTrainedModel

from kvtier.engine.model.digest import weights_digest
from kvtier.engine.model.errors import ChangedModel, UnsupportedModel
from kvtier.engine.model.paged_layout import layout_of
from kvtier.engine.model.paged_model import Chunk
from kvtier.engine.model.runner import ModelRunner
from kvtier.engine.model.state_layers import StateSlab
from kvtier.engine.model.step_cache import CACHE_ARGUMENT
from kvtier.tiers.naming.namespace import StateGeometry
from kvtier.tiers.up.promotion import NO_SLOT

BLOCK_SIZE = 16
EXACT = 1e-4  # of the largest logit, as in `check`


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def runner_of(model: PreTrainedModel, num_states: int = 8) -> ModelRunner:
    return ModelRunner(model, BLOCK_SIZE, layout_of(model, BLOCK_SIZE).capacity_for(60, num_states))


def own_logits(runner: ModelRunner, prompt: list[int], ends: Sequence[int]) -> dict[int, torch.Tensor]:
    """The model's own logits after *ends* tokens, computed alone in chunks that end there."""
    cache, rows = DynamicCache(config=runner.model.config), {}
    with runner.claim.own_attention(), torch.inference_mode():
        for start, end in pairwise([0, *ends]):
            logits = runner.model(
                input_ids=torch.tensor([prompt[start:end]]),
                position_ids=torch.arange(start, end)[None],
                use_cache=True,
                **{CACHE_ARGUMENT: cache},
            ).logits
            rows[end] = logits[0, -1].float()
    return rows


class Tables:
    """A request's block tables: shuffled slots for its blocks, and the given slots for its states."""

    def __init__(self, runner: ModelRunner, slots: list[int], states: dict[int, int]) -> None:
        num_blocks = len(slots)
        state_table = [states.get(block_id, NO_SLOT) for block_id in range(num_blocks)]
        self.tables = [slots] * runner.layout.num_attention_groups + [state_table]

    def chunk(self, prompt: list[int], start: int, end: int) -> Chunk:
        return Chunk(prompt[start:end], start, self.tables)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).abs().max() / expected.abs().max()) <= EXACT


# Linear attention, a state beside attention, no attention, windows, latent rows, layers without any state.
QUICK = ("FalconH1", "KimiLinear", "LaraMini", "Mamba2", "NemotronH", "Qwen3_5Text")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FAMILIES]
)
def test_a_request_that_resumes_a_state_beside_others_gives_the_logits_of_one_alone(family: str) -> None:
    """The third request begins as the first one, and goes on from the state that the first one left at 96 tokens."""
    runner = runner_of(build_states(family))
    first, second = prompt_of(1, 200), prompt_of(2, 200)
    third = first[:96] + prompt_of(3, 60)
    slots = random.Random(5).sample(range(60), 36)
    one = Tables(runner, slots[:12], {5: 0, 9: 1})
    two = Tables(runner, slots[12:24], {2: 2})
    three = Tables(runner, slots[:6] + slots[24:30], {5: 0, 8: 3})
    own = [
        own_logits(runner, first, [96, 150, 151]),
        own_logits(runner, second, [33, 34, 35, 36]),
        own_logits(runner, third, [96, 140, 141]),
    ]

    steps = [
        [(one, first, 0, 96, 0), (two, second, 0, 33, 1)],
        [(one, first, 96, 150, 0), (two, second, 33, 34, 1)],
        [(one, first, 150, 151, 0), (three, third, 96, 140, 2), (two, second, 34, 35, 1)],
        [(three, third, 140, 141, 2), (two, second, 35, 36, 1)],
    ]
    for step in steps:
        logits = runner.run([tables.chunk(prompt, start, end) for tables, prompt, start, end, _ in step])
        for row, (_, _, _, end, request) in zip(logits, step, strict=True):
            assert_close(row, own[request][end])


def test_a_state_that_was_moved_and_copied_is_the_same_bytes() -> None:
    """A state in the middle of a block stays in its slot; the one at the end of a block is left as it is."""
    runner = runner_of(build_states("Qwen3_5Text"))
    slab = runner.slabs[-1]
    assert isinstance(slab, StateSlab)
    prompt, slots = prompt_of(1, 64), list(range(4))

    def state_after(*chunks: tuple[int, int, dict[int, int]]) -> bytes:
        for start, end, states in chunks:
            runner.run([Tables(runner, slots, states).chunk(prompt, start, end)])
        last = chunks[-1]
        return slab.blocks[last[2][(last[1] - 1) // BLOCK_SIZE]].numpy().tobytes()

    in_place = state_after((0, 16, {0: 0}), (16, 40, {0: 0, 2: 0}), (40, 64, {2: 0, 3: 0}))
    copied = state_after((0, 16, {0: 1}), (16, 40, {0: 1, 2: 2}), (40, 64, {3: 2}))
    kept = slab.blocks[1].clone()
    at_16 = state_after((0, 16, {0: 3}))

    assert copied == in_place
    assert kept.numpy().tobytes() == at_16


def test_states_and_their_dtypes_are_part_of_the_namespace() -> None:
    model = build_states("Qwen3_5Text")
    runner = runner_of(model)

    geometry = runner.geometry[-1]

    assert isinstance(geometry, StateGeometry)
    assert geometry.tensors == (
        (0, "convolution", 0, (128, 4), "torch.float32"),
        (0, "recurrent", 0, (4, 16, 16), "torch.float32"),
        (2, "convolution", 0, (128, 4), "torch.float32"),
        (2, "recurrent", 0, (4, 16, 16), "torch.float32"),
    )
    assert runner.block_bytes[-1] == 2 * 4 * (128 * 4 + 4 * 16 * 16)  # a multiple of a page


def test_a_model_in_bfloat16_keeps_recurrent_states_in_float32() -> None:
    runner = runner_of(build_states("Qwen3_5Text").to(torch.bfloat16))
    geometry = runner.geometry[-1]
    assert isinstance(geometry, StateGeometry)
    assert [tensor[4] for tensor in geometry.tensors] == ["torch.bfloat16", "torch.float32"] * 2


@pytest.mark.parametrize("family", ["Mamba", "Jamba"])
def test_a_model_that_ignores_its_state_at_the_beginning_of_a_chunk_is_refused(family: str) -> None:
    import state_models

    sizes = {"state_size": 16, "time_step_rank": 8, "mamba_d_state": 16, "mamba_dt_rank": 8, "attn_layer_period": 2}
    sizes |= {"attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(state_models.FAMILIES, family, sizes | {"num_experts": 2, "num_experts_per_tok": 1})
        model = build_states(family)

    with pytest.raises(UnsupportedModel, match="does not compute a prompt in several chunks correctly"):
        runner_of(model)


def test_an_ignored_state_shows_at_the_first_tokens_of_a_chunk_even_if_it_decays_before_the_last() -> None:
    model = tiny_model("zamba")

    with pytest.raises(UnsupportedModel, match="does not compute a prompt in several chunks correctly"):
        runner_of(model)


@pytest.mark.parametrize(("family", "kinds"), [("Bamba", "attn_layer_indices"), ("GraniteMoeHybrid", "layer_types")])
def test_a_model_whose_own_code_needs_a_layer_with_attention_is_refused(
    monkeypatch: pytest.MonkeyPatch, family: str, kinds: str
) -> None:
    import state_models

    none = [] if family == "Bamba" else ["mamba"] * 4
    monkeypatch.setitem(state_models.FAMILIES, family, {**state_models.FAMILIES[family], kinds: none})

    with pytest.raises(UnsupportedModel, match="cannot continue a prompt with transformers' cache") as refused:
        runner_of(build_states(family))

    assert "\n" not in str(refused.value)


def test_a_model_has_its_own_mixers_between_passes_and_the_same_digest() -> None:
    model = build_states("FalconH1")
    before = weights_digest(model)
    runner = runner_of(model)

    mixer = model.model.layers[0].mamba
    during: list[str] = []
    handle = mixer.in_proj.register_forward_hook(lambda *args: during.append(type(mixer.forward).__name__))
    runner.run([Tables(runner, [0], {0: 0}).chunk(prompt_of(1, 5), 0, 5)])
    assert during == ["SplitMixer"]
    assert "forward" not in vars(mixer)
    handle.remove()
    assert weights_digest(model) == before


def test_a_mixer_that_is_not_called_is_a_changed_model() -> None:
    model = build_states("Qwen3_5Text")
    runner = runner_of(model)
    model.model.layers[0].forward = lambda hidden_states, **kwargs: hidden_states

    with pytest.raises(ChangedModel, match="only 3 of 4 layers"):
        runner.run([Tables(runner, [0], {0: 0}).chunk(prompt_of(1, 5), 0, 5)])


def test_half_of_the_memory_at_most_is_for_states_and_at_least_two() -> None:
    layout = layout_of(build_states("Mamba2"), BLOCK_SIZE)
    assert layout.num_slots(10 * layout.block_bytes[0]) == (10,)

    layout = layout_of(build_states("FalconH1"), BLOCK_SIZE)
    block, state = layout.block_bytes
    for capacity in (4 * state, 100 * state, 10_000 * state):
        num_blocks, num_states = layout.num_slots(capacity)
        assert num_states >= 2
        assert num_states * state <= max(2 * state, capacity // 2)
        assert capacity - block < num_blocks * block + num_states * state <= capacity
    # Two states per interval, so that one is kept for each interval of what fits.
    assert layout.state_interval == 512
    assert layout.mean_block_bytes == block + state // 32
    assert num_states == pytest.approx(2 * num_blocks * BLOCK_SIZE / 512, rel=0.01)

    with pytest.raises(ValueError, match="less than 2 recurrent states of 45056 bytes"):
        layout.device_slots(2 * state)
    assert layout.device_slots(layout.capacity_for(2))


def test_a_short_interval_gives_more_of_the_memory_to_states_and_none_gives_less() -> None:
    model = build_states("FalconH1")
    slots = {}
    for interval in (None, 64, 0, 1 << 16):
        layout = layout_of(model, BLOCK_SIZE, state_interval=interval)
        assert layout.state_interval == (512 if interval is None else interval)
        slots[interval] = layout.num_slots(10_000 * layout.token_block_bytes)

    assert slots[64][1] > 3 * slots[None][1] > 30 * slots[0][1]
    assert slots[64][0] < slots[None][0] < slots[0][0]
    assert slots[1 << 16] == slots[0]  # the ends of prompts are kept with any interval


def test_the_interval_of_a_large_state_is_as_many_tokens_as_have_its_size() -> None:
    import state_models

    with pytest.MonkeyPatch.context() as patch:
        wide = {**state_models.FAMILIES["Qwen3_5Text"], "linear_value_head_dim": 2048, "linear_key_head_dim": 64}
        patch.setitem(state_models.FAMILIES, "Qwen3_5Text", wide)
        layout = layout_of(build_states("Qwen3_5Text"), BLOCK_SIZE)

    interval = layout.state_interval
    assert interval is not None
    assert interval % BLOCK_SIZE == 0
    tokens_bytes = interval // BLOCK_SIZE * layout.token_block_bytes
    assert layout.states.slot_bytes <= tokens_bytes < layout.states.slot_bytes + layout.token_block_bytes


def test_another_thread_cannot_use_the_states_of_a_pass() -> None:
    model = build_states("Mamba2")  # without attention, which would refuse the call too
    runner = runner_of(model)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            model(input_ids=torch.tensor([prompt_of(2, 5)]))
        except ChangedModel as error:
            raised.append(error)

    def call_meanwhile(*args: object) -> None:
        other = threading.Thread(target=call)
        other.start()
        other.join()

    handle = model.backbone.layers[0].mixer.in_proj.register_forward_hook(call_meanwhile)
    try:
        runner.run([Tables(runner, [0], {0: 0}).chunk(prompt_of(1, 5), 0, 5)])
    finally:
        handle.remove()

    assert [str(error)[:21] for error in raised] == ["an engine of kvtier c"]
