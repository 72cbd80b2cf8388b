"""Loading against computing in the whole engine, in simulated time: see `simulated_engine`."""

from statistics import mean

import pytest
from simulated_engine import BLOCK_BYTES, WAYS, Machine, SimulatedEngine, documents

from kvtier.engine.scheduling.request import Request
from kvtier.engine.scheduling.scheduler import Work
from kvtier.engine.scheduling.step_times import StepTimes
from kvtier.tiers.lower import reads
from kvtier.tiers.naming.tier import Reason
from kvtier.tiers.up import uploads
from kvtier.tiers.up.prefill_speed import PrefillSpeed, tokens_read


@pytest.fixture(autouse=True)
def one_block_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "BATCH_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(uploads, "BATCH_BYTES", BLOCK_BYTES)


def engines(disk_bytes_per_s: float, per_s: float) -> tuple[dict[str, SimulatedEngine], dict[str, float]]:
    """The three ways to answer, and the mean time to the first token of each."""
    machine = Machine(disk_bytes_per_s=disk_bytes_per_s, device_blocks=128, host_blocks=128)
    prompts = documents(120, num_documents=20, num_blocks=16, per_s=per_s)
    made = {way: SimulatedEngine(machine, load, with_disk) for way, (load, with_disk) in WAYS.items()}
    means = {way: mean(engine.answer(prompts)) for way, engine in made.items()}
    for engine in made.values():
        engine.cache.check()
        tokens = engine.tokens
        assert tokens.num_tokens == sum(len(prompt.token_ids) for prompt in prompts)
        assert sum(tokens.reasons.values()) == tokens.recomputed
    return made, means


@pytest.mark.long
def test_a_saturated_disk_that_loses_against_none_is_made_to_win() -> None:
    made, means = engines(disk_bytes_per_s=1e9, per_s=2.5)

    assert means["always"] > means["no disk"]
    assert means["cost"] < 0.7 * means["no disk"]
    assert made["cost"].tokens.disk > 0
    assert made["cost"].tokens.reasons[Reason.COST] > 0


@pytest.mark.long
@pytest.mark.parametrize("disk_bytes_per_s", [6e9, 50e9])
def test_on_fast_lanes_everything_is_loaded(disk_bytes_per_s: float) -> None:
    made, means = engines(disk_bytes_per_s, per_s=1.0)

    assert made["cost"].tokens.reasons.get(Reason.COST, 0) == 0
    assert means["cost"] == pytest.approx(means["always"])


# --- what the prefill speed is told


def test_steps_are_told_when_a_token_was_sampled_and_only_with_prefill(request_of: Request) -> None:
    told: list[tuple[int, float, float, int]] = []

    class Listening(PrefillSpeed):
        def on_computed(self, num_tokens: int, num_read: float, seconds: float, num_steps: int = 1) -> None:
            told.append((num_tokens, num_read, seconds, num_steps))

    times = StepTimes(Listening(), 16)
    times.on_step([Work(request_of, 64)], [0], 0.5, has_sampled=False)
    times.on_step([Work(request_of, 40)], [64], 0.25, has_sampled=True)
    times.on_step([Work(request_of, 1)], [104], 0.125, has_sampled=True)

    assert told == [(104, tokens_read(0, 64) + tokens_read(64, 40), 0.75, 2)]


@pytest.fixture
def request_of() -> Request:
    machine = Machine(device_blocks=16, host_blocks=16)
    return SimulatedEngine(machine, "always", with_disk=False).ask(documents(1, num_blocks=2)[0])
