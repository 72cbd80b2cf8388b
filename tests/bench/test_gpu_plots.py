"""The plots of what was measured on a GPU, drawn from its JSON files."""

import importlib.util
import json
from pathlib import Path

import pytest
from benchmarks import run_benchmark

ROWS = [
    {"name": "host TTFT, 32k", "value": 0.2, "unit": "s"},
    {"name": "host TTFT, 32k, layer-wise", "value": 0.15, "unit": "s"},
    {"name": "decode, no spill", "value": 900.0, "unit": "tokens/s"},
    {"name": "512 KiB up: plain pinned copy", "value": 55.0, "unit": "GB/s"},
    {"name": "1 MiB down: chosen, scattered", "value": 50.0, "unit": "GB/s"},
]
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a benchmark's results."""
    (tmp_path / "gpu.json").write_text(json.dumps({"rows": ROWS}))
    return tmp_path


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
@pytest.mark.long
def test_each_kind_of_row_is_drawn_into_a_file_of_its_own(folder: Path) -> None:
    done = run_benchmark("bench.gpu_plots", str(folder))

    files = [Path(line) for line in done.stdout.splitlines()]
    assert {file.name for file in files} >= {"ttft.png", "decoding.png"}
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


@pytest.mark.skipif(HAS_MATPLOTLIB, reason="matplotlib is installed")
def test_without_matplotlib_one_line_says_that_there_are_no_plots(folder: Path) -> None:
    done = run_benchmark("bench.gpu_plots", str(folder))

    assert (done.returncode, done.stdout) == (0, "")
    assert len(done.stderr.splitlines()) == 1
