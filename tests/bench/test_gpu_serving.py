"""The benchmark of serving on a GPU: its tiny shape runs on any machine, and a row says truly what it kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import run_benchmark

pytestmark = pytest.mark.long
SERVING = "bench.engine.gpu_serving"
NO_SPILL, CLEAN_AHEAD, ON_EVICT = "no spill", "clean-ahead", "spill-on-evict"

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


def measured(file: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Status, and the rows by name, of the tiny shape."""
    done = run_benchmark(SERVING, "--shape", "tiny", "--json", str(file), *arguments)
    assert file.exists(), done.stderr
    result = json.loads(file.read_text())
    assert set(result) == {"bench", "machine", "commit", "rows"}
    return done.returncode, {row["name"]: row for row in result["rows"]}


def is_kept(row: dict[str, Any]) -> bool | None:
    """Whether the value is what the row's target asks for, as a person would read it."""
    relation, _, wanted = row["target"].rpartition(" ")
    if not row["target"]:
        return None
    value, bound = row["value"], float(wanted)
    return {">=": value >= bound, ">": value > bound, "<=": value <= bound, "<": value < bound, "": value == bound}[
        relation
    ]


def test_the_tiny_shape_gives_every_row_and_each_says_truly_what_it_kept(tmp_path: Path) -> None:
    status, rows = measured(tmp_path / "results" / "gpu_serving.json", "--seconds", "60")

    assert status == 0
    assert rows.keys() >= ROWS
    assert {name: row["ok"] for name, row in rows.items()} == {name: is_kept(row) for name, row in rows.items()}
    assert rows["promoted blocks compared"]["ok"]
    assert rows["promoted blocks that differ"]["value"] == 0
    assert rows["promoted blocks that differ"]["ok"]
    assert rows[f"{CLEAN_AHEAD}: blocks pushed out while decoding"]["ok"]


def test_a_length_that_there_is_no_time_for_and_parts_that_were_not_asked_for_are_left_out(tmp_path: Path) -> None:
    _, rows = measured(tmp_path / "rows.json", "--parts", "b,e", "--seconds", "0")

    assert not rows["1k left out, would take"]["ok"]
    assert "cold TTFT, 1k" not in rows
    assert not any(name.startswith(("decode", "0% hits")) for name in rows)
    assert not rows["promoted blocks compared"]["ok"], "no block compared proves nothing"


@pytest.mark.parametrize("parts", ["e", "b,x"])
def test_parts_that_cannot_be_are_refused(parts: str) -> None:
    done = run_benchmark(SERVING, "--shape", "tiny", "--parts", parts)

    assert done.returncode == 2
    assert "--parts" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "module", [SERVING, "bench.transfer.gpu_copies", "bench.engine.paged_attention", "bench.gpu_bench"]
)
def test_without_cuda_a_benchmark_of_a_gpu_ends_with_one_line_and_status_2(module: str) -> None:
    done = run_benchmark(module)

    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "needs a CUDA device" in done.stderr
