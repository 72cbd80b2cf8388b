"""The benchmark of a GPU: its rows keep and miss promises as they should, and its tiny shape runs on any machine."""

import json
import sys
import time
from pathlib import Path

import gpu_plots
import gpu_report
import gpu_serving
import pytest
import torch
from gpu_bench import folder_name
from gpu_decoding import CLEAN_AHEAD, NO_SPILL, ON_EVICT, Spilled, decoding_rows
from gpu_misses import OFF, ON, Turn, miss_rows
from gpu_progress import Clock, failure, has_failed
from gpu_shapes import SHAPES, Prompts
from gpu_ttft import Ledger, Roof, Ttft, equality_rows, left_out, ttft_rows
from report import Row

K = 1024
TOKEN_BYTES = 131072

TTFTS = [f"{tier} TTFT, {length}" for tier in ("cold", "device", "host", "disk") for length in ("256", "1k")]
ROWS = {
    "host tier pinned",
    *TTFTS,
    *(f"cold / {name}" for name in TTFTS if not name.startswith("cold")),
    "plain pinned copy of 1k's blocks",
    "question after 1k of prefix",
    "(host TTFT, 1k - question) / plain pinned copy",
    "promoted blocks compared",
    "promoted blocks that differ",
    *(f"decode, {name}" for name in (NO_SPILL, CLEAN_AHEAD, ON_EVICT)),
    f"decode, {CLEAN_AHEAD} / {NO_SPILL}",
    f"decode, {ON_EVICT} / {NO_SPILL}",
    *(f"{name}: blocks pushed out while decoding" for name in (CLEAN_AHEAD, ON_EVICT)),
    *(
        f"{name}: dropped spills while {what}"
        for name in (CLEAN_AHEAD, ON_EVICT)
        for what in ("decoding", "prefilling")
    ),
    "0% hits: TTFT, tiers on / off",
    "0% hits: tokens/s, tiers on / off",
}


def ok_of(rows: list[Row], name: str) -> bool | None:
    """Whether the row of that name kept its promise."""
    (row,) = [row for row in rows if row.name == name]
    return row.ok


def hits(host_s: float, disk_s: float = 0.5) -> list[Ttft]:
    """Of 32k tokens: recomputing takes 3 s, the question 20 ms."""
    return [
        Ttft("cold", 32 * K, (3.0, 3.1, 2.9)),
        Ttft("device", 32 * K, (0.02, 0.02, 0.02)),
        Ttft("host", 32 * K, (host_s, host_s)),
        Ttft("disk", 32 * K, (disk_s,)),
    ]


@pytest.mark.long
def test_tiny_shape_gives_every_row_on_any_machine(tmp_path: Path) -> None:
    file = tmp_path / "results" / "gpu_serving.json"

    gpu_serving.main(["--shape", "tiny", "--json", str(file), "--seconds", "60"])

    result = json.loads(file.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert set(result) == {"bench", "machine", "commit", "rows"}
    assert rows.keys() >= ROWS
    assert rows["promoted blocks compared"]["ok"]
    assert rows["promoted blocks that differ"]["value"] == 0
    assert rows["promoted blocks that differ"]["ok"]
    assert rows[f"{CLEAN_AHEAD}: blocks pushed out while decoding"]["ok"]


@pytest.mark.long
def test_parts_that_were_not_asked_for_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"

    gpu_serving.main(["--shape", "tiny", "--json", str(file), "--parts", "d"])

    names = {row["name"] for row in json.loads(file.read_text())["rows"]}
    assert "0% hits: TTFT, tiers on / off" in names
    assert not any(name.startswith(("decode", "cold", "promoted")) for name in names)


def test_a_length_that_there_is_no_time_for_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"

    gpu_serving.main(["--shape", "tiny", "--json", str(file), "--parts", "b,e", "--seconds", "0"])

    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert not rows["1k left out, would take"]["ok"]
    assert "cold TTFT, 1k" not in rows


def test_a_part_that_fails_is_a_row_and_the_next_ones_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> list[Row]:
        raise RuntimeError("out of memory")

    file = tmp_path / "rows.json"
    monkeypatch.setattr(gpu_serving, "decoding_speed", fail)
    monkeypatch.setattr(gpu_serving, "cost_of_misses", lambda *_: [Row("measured", 1.0, "")])

    with pytest.raises(SystemExit) as end:
        gpu_serving.main(["--shape", "tiny", "--json", str(file), "--parts", "c,d"])

    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert end.value.code == 1
    assert rows["part c: RuntimeError"]["ok"] is False
    assert "measured" in rows


def test_a_part_of_the_copies_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    def fail() -> list[Row]:
        assert [row["name"] for row in json.loads(file.read_text())["rows"]] == ["measured"], "written after each part"
        raise RuntimeError("host memory could not be pinned")

    file = tmp_path / "results" / "rows.json"
    parts = {"first": lambda: [Row("measured", 1.0, "")], "second": fail, "third": lambda: [Row("too", 2.0, "")]}

    rows = gpu_report.measure("gpu_copies", parts, file)

    assert [row.name for row in rows] == ["measured", "second: RuntimeError", "too"]
    assert [row["name"] for row in json.loads(file.read_text())["rows"]] == [row.name for row in rows]
    with pytest.raises(SystemExit) as end:
        gpu_report.publish_gpu("gpu_copies", rows)
    assert end.value.code == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_the_large_shape_ends_with_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        gpu_serving.main([])

    assert end.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("parts", ["e", "b,x"])
def test_parts_that_cannot_be_are_refused(parts: str) -> None:
    with pytest.raises(SystemExit) as end:
        gpu_serving.parse(["--shape", "tiny", "--parts", parts])

    assert end.value.code == 2


def test_the_large_shape_is_that_of_llama_3_1_8b() -> None:
    shape = SHAPES["llama-8b"]

    with torch.device("meta"):
        num_parameters = sum(weight.numel() for weight in shape.build(torch.device("meta")).parameters())

    assert num_parameters == 8_030_261_248
    assert shape.token_bytes == TOKEN_BYTES
    assert shape.tiers(shape.documents.pools)["device"]["capacity"] == 24 << 30
    assert shape.tiers(shape.documents.pools)["host"]["capacity"] == 40 << 30


@pytest.mark.parametrize(("host_s", "ok"), [(0.249, True), (0.251, False)])
def test_a_host_hit_is_to_take_a_twelfth_of_recomputing(host_s: float, ok: bool) -> None:
    rows = ttft_rows(hits(host_s), None, 32 * K, TOKEN_BYTES)

    assert ok_of(rows, "cold / host TTFT, 32k") is ok
    assert ok_of(rows, "cold / disk TTFT, 32k") is None


@pytest.mark.parametrize(("host_s", "ok"), [(0.134, True), (0.136, False)])
def test_a_host_hit_is_to_take_little_more_than_one_copy_and_the_question(host_s: float, ok: bool) -> None:
    rows = ttft_rows(hits(host_s), Roof(32 * K * TOKEN_BYTES, 0.1), 32 * K, TOKEN_BYTES)

    assert ok_of(rows, "(host TTFT, 32k - question) / plain pinned copy") is ok


def test_nothing_is_promised_of_other_lengths() -> None:
    rows = ttft_rows(hits(2.0), None, 64 * K, TOKEN_BYTES)

    assert all(row.ok is None for row in rows)


def test_a_way_to_load_has_rows_of_its_own() -> None:
    found = [*hits(0.2), Ttft("host", 32 * K, (0.15,), loading="layer-wise")]

    rows = ttft_rows(found, None, 32 * K, TOKEN_BYTES)

    assert {"host TTFT, 32k", "host TTFT, 32k, layer-wise"} <= {row.name for row in rows}
    assert gpu_plots.ttft_lines([vars(row) for row in rows])["host, layer-wise"] == {32 * K: 150.0}


def test_a_block_that_came_back_with_other_bytes_is_counted() -> None:
    ledger = Ledger()
    ledger.computed([b"a", b"b"], [b"1", b"2"])

    ledger.promoted([b"a", b"b"], [b"1", b"3"])

    assert (ledger.num_compared, ledger.num_different) == (2, 1)
    assert ok_of(equality_rows(ledger), "promoted blocks that differ") is False


def test_no_block_compared_proves_nothing() -> None:
    rows = equality_rows(Ledger())

    assert ok_of(rows, "promoted blocks compared") is False
    assert ok_of(rows, "promoted blocks that differ") is False


@pytest.mark.parametrize(("ahead", "ok"), [(97.1, True), (96.9, False)])
def test_decoding_is_to_lose_little_by_cleaning_ahead(ahead: float, ok: bool) -> None:
    speeds = {NO_SPILL: [100.0, 200.0], CLEAN_AHEAD: [ahead, 2 * ahead], ON_EVICT: [50.0, 100.0]}
    spilled = {name: (Spilled(9, 0, 9), Spilled(9, 0, 9)) for name in (CLEAN_AHEAD, ON_EVICT)}

    rows = decoding_rows(speeds, spilled)

    assert ok_of(rows, f"decode, {CLEAN_AHEAD} / {NO_SPILL}") is ok
    assert ok_of(rows, f"{CLEAN_AHEAD}: dropped spills while decoding") is True


def test_dropped_spills_and_a_decode_that_pushes_nothing_out_miss_what_was_promised() -> None:
    speeds = {name: [1.0] for name in (NO_SPILL, CLEAN_AHEAD, ON_EVICT)}
    spilled = {CLEAN_AHEAD: (Spilled(0, 0, 0), Spilled(9, 3, 0)), ON_EVICT: (Spilled(5, 5, 0), Spilled())}

    rows = decoding_rows(speeds, spilled)

    assert ok_of(rows, f"{CLEAN_AHEAD}: blocks pushed out while decoding") is False
    assert ok_of(rows, f"{CLEAN_AHEAD}: dropped spills while decoding") is True
    assert ok_of(rows, f"{CLEAN_AHEAD}: dropped spills while prefilling") is False
    assert ok_of(rows, f"{ON_EVICT}: dropped spills while decoding") is None


@pytest.mark.parametrize(("ttft_s", "speed", "ok"), [(1.019, 98.1, True), (1.021, 97.9, False)])
def test_misses_are_to_cost_two_per_cent_at_most(ttft_s: float, speed: float, ok: bool) -> None:
    rows = miss_rows({ON: [Turn(ttft_s, speed)] * 3, OFF: [Turn(1.0, 100.0)] * 3})

    assert ok_of(rows, "0% hits: TTFT, tiers on / off") is ok
    assert ok_of(rows, "0% hits: tokens/s, tiers on / off") is ok


def test_a_promise_that_is_not_measured_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock.of(1.0)

    assert left_out(32 * K, is_promised=True, expected_s=60.0, clock=clock).ok is False
    assert left_out(64 * K, is_promised=False, expected_s=60.0, clock=clock).ok is None
    assert "64k left out" in capsys.readouterr().err


def test_what_failed_is_known_from_its_row() -> None:
    assert has_failed([Row("a", 1.0, "s"), failure("64k", RuntimeError("too little memory"))])
    assert not has_failed([Row("a", 1.0, "s", "< 1", False)])


def test_a_part_of_the_time_is_a_share_of_what_is_left() -> None:
    clock = Clock(time.monotonic() - 60, time.monotonic() + 40)

    assert 19 < clock.part(0.5).left <= 20
    assert clock.part(0.5).started == clock.started


def test_prompts_share_no_first_token() -> None:
    prompts = Prompts(vocab_size=1000)

    assert len({prompts.new(4)[0] for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("gpu", "folder"), [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"), ("H100", "h100")]
)
def test_results_lie_in_a_folder_named_after_the_gpu(gpu: str, folder: str) -> None:
    assert folder_name(gpu) == folder


def test_copies_are_drawn_by_size_and_direction() -> None:
    rows = [
        {"name": "512 KiB up: plain pinned copy", "value": 55.0, "unit": "GB/s"},
        {"name": "1 MiB up: chosen, scattered", "value": 54.0, "unit": "GB/s"},
        {"name": "1 MiB down: chosen, scattered", "value": 50.0, "unit": "GB/s"},
        {"name": "1 MiB up: chosen, scattered / plain", "value": 0.98, "unit": ""},
    ]

    lines = gpu_plots.copy_lines(rows)

    assert lines == {
        "H2D, plain pinned copy": {512: 55.0},
        "H2D, chosen, scattered": {1024: 54.0},
        "D2H, chosen, scattered": {1024: 50.0},
    }


def test_plots_are_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [vars(row) for row in ttft_rows(hits(0.2), None, 32 * K, TOKEN_BYTES)]

    files = gpu_plots.plot([*rows, {"name": "decode, no spill", "value": 900.0, "unit": "tokens/s"}], tmp_path)

    assert [file.name for file in files] == ["ttft.png", "decoding.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_without_matplotlib_one_line_says_that_there_are_no_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert gpu_plots.plot([{"name": "decode, no spill", "value": 900.0, "unit": "tokens/s"}], tmp_path) == []
    assert len(capsys.readouterr().err.splitlines()) == 1
