"""Prompts that an operator has kept in host memory: by the clock, and over HTTP."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from layout_bed import EXTENT_BYTES, LayoutBed, layout
from sidecars import RunningSidecar, running_sidecar, small_config
from waiting import wait_for

from kvtier.sidecar.pins import MAX_PINS, PART, Pins, TooManyPins
from kvtier.store.memory_store import MemoryStore

PER_EXTENT = EXTENT_BYTES // 4096
NUM_SLOTS = 8 * PER_EXTENT  # of the bed
TOKENS = 8  # of a chunk


@pytest.fixture
def bed() -> Iterator[LayoutBed]:
    made = LayoutBed(Path("/dev/shm"), num_extents=8, store=MemoryStore(4 << 20))
    yield made
    made.layouts.check()
    made.close()


@pytest.fixture
def pins(bed: LayoutBed) -> Iterator[Pins]:
    made = Pins(bed.layouts.shares, bed.clock)
    yield made
    for pin in made:
        made.unpin(pin.pin_id)
    made.check()
    assert bed.layouts.shares.leased.num_bytes == bed.layouts.shares.pending_bytes == 0


def fill(bed: LayoutBed, model: str = "m") -> None:
    """Other documents than 1 and 2, as much as host memory takes."""
    for document in range(10, 10 + 2 * NUM_SLOTS // PER_EXTENT):
        bed.put(bed.layouts.open(layout(model)), document, PER_EXTENT)


def test_a_pinned_prompt_stays_in_host_memory_until_its_time_is_over(bed: LayoutBed, pins: Pins) -> None:
    tiers = bed.layouts.open(layout())
    bed.put(tiers, 1, 12)
    bed.put(tiers, 2, 12)
    pins.pin("one", [(tiers, bed.blocks(tiers, 1, 12))], 600.0)
    fill(bed)

    assert (tiers.tiers.find(0, bed.chain(tiers, 1, 12).names) >= 0).all()
    assert (tiers.tiers.find(0, bed.chain(tiers, 2, 12).names) < 0).all()
    bed.clock.now += 590.0
    pins.poll()
    assert tiers.num_leased == 12
    bed.clock.now += 10.0
    pins.poll()
    assert (tiers.num_leased, list(pins)) == (0, [])
    fill(bed)
    assert (tiers.tiers.find(0, bed.chain(tiers, 1, 12).names) < 0).all()


def test_what_is_on_disk_only_is_fetched(bed: LayoutBed, pins: Pins) -> None:
    tiers = bed.layouts.open(layout())
    bed.put(tiers, 1, 12)
    fill(bed)
    assert (tiers.tiers.find(0, bed.chain(tiers, 1, 12).names) == -2).all()

    pins.pin("one", [(tiers, bed.blocks(tiers, 1, 20))], 600.0)
    (before,) = pins.view("one") or []
    bed.settle()
    (view,) = pins.view("one") or []

    assert (before.num_coming, view.num_coming) == (12, 0)
    assert (view.num_chunks, view.num_tokens, view.num_beyond) == (12, 12 * TOKENS, 0)
    assert (tiers.tiers.find(0, bed.chain(tiers, 1, 12).names) >= 0).all()


def test_all_pins_together_have_a_part_of_host_memory_and_say_what_is_left_out(bed: LayoutBed, pins: Pins) -> None:
    tiers = bed.layouts.open(layout())
    limit = int(PART * NUM_SLOTS)
    for document in (1, 2):
        bed.put(tiers, document, limit - 4)
        pins.pin(f"{document}", [(tiers, bed.blocks(tiers, document, limit - 4))], 600.0)

    (first,), (second,) = pins.view("1") or [], pins.view("2") or []

    assert (first.num_chunks, first.num_beyond) == (limit - 4, 0)
    assert (second.num_chunks, second.num_tokens, second.num_beyond) == (4, 4 * TOKENS, limit - 8)
    assert pins.statistics().num_bytes == pins.statistics().max_bytes == limit * 4096


def test_pinning_again_is_for_a_new_time_and_loses_nothing_meanwhile(bed: LayoutBed, pins: Pins) -> None:
    tiers = bed.layouts.open(layout())
    limit = int(PART * NUM_SLOTS)
    bed.put(tiers, 1, limit)
    wanted = [(tiers, bed.blocks(tiers, 1, limit))]
    pins.pin("one", wanted, 10.0)
    bed.clock.now += 9.0

    pins.pin("one", wanted, 10.0)

    bed.clock.now += 9.0
    pins.poll()
    (view,) = pins.view("one") or []
    assert (view.num_chunks, view.num_beyond, tiers.num_leased) == (limit, 0, limit)


def test_a_prefix_is_as_long_as_all_ranks_have_it(bed: LayoutBed, pins: Pins) -> None:
    tiers = bed.layouts.open(layout(world_size=2))
    bed.put(tiers, 1, 6, rank=0)
    bed.put(tiers, 1, 4, rank=1)

    pins.pin("one", [(tiers, bed.blocks(tiers, 1, 6))], 600.0)

    (view,) = pins.view("one") or []
    assert (view.num_chunks, view.num_tokens) == (8, 4 * TOKENS)
    assert [lease.num_chunks for holder in pins.holders() for lease in holder.leases] == [4, 4]


def test_a_cleared_layout_has_no_pins(bed: LayoutBed, pins: Pins) -> None:
    tiers, other = bed.layouts.open(layout()), bed.layouts.open(layout("other"))
    for each in (tiers, other):
        bed.put(each, 1, 4)
        pins.pin(each.layout.model, [(each, bed.blocks(each, 1, 4))], 600.0)

    tiers.clear()
    pins.poll()

    assert [pin.pin_id for pin in pins] == ["other"]
    assert (tiers.num_leased, other.num_leased) == (0, 4)


def test_there_are_only_so_many_pins(bed: LayoutBed, pins: Pins) -> None:
    for number in range(MAX_PINS):
        pins.pin(str(number), [], 600.0)

    with pytest.raises(TooManyPins, match="256 pins already"):
        pins.pin("one more", [], 600.0)
    pins.pin("0", [], 600.0)


# Over HTTP.


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningSidecar]:
    with running_sidecar(small_config(tmp_path / "store")) as made:
        wait_for(lambda: made.get("/v1/kvtier/stats").json()["store"]["not_open"] is None)
        yield made


def tokens(document: int, num_chunks: int) -> list[int]:
    return [document * 1000 + i for i in range(num_chunks * TOKENS)]


def pin(running: RunningSidecar, **changed: object) -> dict[str, object]:
    answer = running.post("/v1/kvtier/pin", json={"model": "m", "token_ids": tokens(1, 6), "seconds": 600, **changed})
    return dict(answer.json(), status=answer.status_code)


def test_an_operator_pins_a_prompt_sees_it_and_ends_it(running: RunningSidecar) -> None:
    stored = running.store(1, 6)
    found = pin(running, token_ids=[*tokens(1, 6), 1, 2, 3])

    assert (found["status"], found["num_chunks"], found["num_tokens"], found["seconds"]) == (200, 6, 6 * TOKENS, 600)
    assert found["layouts"] == [
        {"layout": stored.digest.hex(), "num_chunks": 6, "num_tokens": 48, "num_coming": 0, "num_beyond": 0}
    ]
    (lease,) = running.get("/v1/kvtier/leases").json()["leases"]
    assert (lease["client"], lease["use"], lease["num_chunks"]) == (f"pin {found['pin']}", "pinned", 6)
    assert running.get("/v1/kvtier/clients").json()["clients"] == []
    assert running.get("/v1/kvtier/stats").json()["pins"] == {
        "num_pins": 1,
        "num_bytes": 6 * 4096,
        "max_bytes": 1 << 20,
    }
    assert "kvtier_sidecar_pinned_bytes 24576.0" in running.get("/metrics").text

    ended = running.delete(f"/v1/kvtier/pin?pin={found['pin']}")
    assert (ended.status_code, ended.json()["num_chunks"]) == (200, 0)
    assert running.get("/v1/kvtier/leases").json()["leases"] == []
    assert running.delete(f"/v1/kvtier/pin?pin={found['pin']}").status_code == 404


def test_a_prompt_that_is_on_disk_only_is_in_host_memory_when_the_answer_comes(running: RunningSidecar) -> None:
    running.store(1, 6)
    running.post("/v1/kvtier/spill?timeout_s=60")
    for document in range(2, 12):
        running.store(document, 200)
        running.post("/v1/kvtier/spill?timeout_s=60")
    assert running.ask(lambda: running.sidecar.saving().num_left) == 0

    found = pin(running)

    assert (found["num_chunks"], found["num_tokens"]) == (6, 48)


def test_seconds_0_ends_the_pin_of_the_same_prompt(running: RunningSidecar) -> None:
    running.store(1, 6)
    one = pin(running)
    other = pin(running, token_ids=tokens(1, 5))
    assert one["pin"] != other["pin"]

    ended = pin(running, seconds=0)

    assert (ended["pin"], ended["num_chunks"]) == (one["pin"], 0)
    assert [lease["client"] for lease in running.get("/v1/kvtier/leases").json()["leases"]] == [f"pin {other['pin']}"]


def test_a_prompt_with_another_salt_or_of_no_layout_is_not_pinned(running: RunningSidecar) -> None:
    running.store(1, 6)

    assert pin(running, salt="ann")["num_chunks"] == 0
    assert pin(running, token_ids=[5] * 100)["num_chunks"] == 0
    missing = pin(running, model="another")
    assert missing["status"] == 404
    assert "no engine of the model 'another' has attached" in str(missing["error"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"model": "m", "seconds": 1}', "token_ids: is missing"),
        (b'{"model": "m", "token_ids": [], "seconds": 1}', "token_ids: "),
        (b'{"model": "m", "token_ids": [-1], "seconds": 1}', "token_ids"),
        (b'{"model": "m", "token_ids": [4294967296], "seconds": 1}', "token_ids"),
        (b'{"model": "m", "token_ids": [1], "seconds": 1e9}', "seconds: "),
        (b'{"model": "m", "token_ids": [1], "seconds": 1, "salts": "x"}', "salts: unknown parameter"),
    ],
)
def test_a_body_that_is_nonsense_is_refused_in_a_sentence(running: RunningSidecar, body: bytes, message: str) -> None:
    answer = running.post("/v1/kvtier/pin", content=body)

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert running.get("/v1/kvtier/stats").json()["pins"]["num_pins"] == 0


def test_a_body_without_end_is_refused(running: RunningSidecar) -> None:
    assert running.post("/v1/kvtier/pin", content=b" " * (9 << 20)).status_code == 413
