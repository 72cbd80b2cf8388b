"""Runs every benchmark of a GPU in under nine minutes: JSON files and plots, in bench/results/<the GPU>/."""

import subprocess
import sys
import time
from pathlib import Path

import torch

BENCH = Path(__file__).resolve().parent
TOTAL_S = 530.0
COPIES_S = 240.0  # about 120 on an H200
SERVING_S = 390.0
AROUND_S = 25.0  # for importing torch and transformers, ending processes and drawing


def folder_name(gpu: str) -> str:
    """A GPU's name as a folder's: h200 for NVIDIA H200."""
    return gpu.lower().removeprefix("nvidia ").replace(" ", "-")


def run(module: str, *arguments: str, timeout_s: float) -> bool:
    """Run one benchmark from the repository's top, where kvtier is found; returns whether it succeeded in time."""
    argv = [sys.executable, "-m", module, *arguments]
    try:
        return subprocess.run(argv, timeout=timeout_s, check=False, cwd=BENCH.parent).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{module}: ended after {timeout_s:.0f} s", file=sys.stderr)
        return False


def main() -> None:
    if not torch.cuda.is_available():
        print("gpu_bench: needs a CUDA device, and torch sees none", file=sys.stderr)
        sys.exit(2)
    started = time.monotonic()
    folder = BENCH / "results" / folder_name(torch.cuda.get_device_name())
    folder.mkdir(parents=True, exist_ok=True)
    copies = run("bench.transfer.gpu_copies", "--json", str(folder / "gpu_copies.json"), timeout_s=COPIES_S)
    left_s = TOTAL_S - (time.monotonic() - started)
    seconds = min(SERVING_S, left_s - AROUND_S)
    serving = run(
        "bench.engine.gpu_serving",
        *("--json", str(folder / "gpu_serving.json"), "--seconds", f"{seconds:.0f}"),
        timeout_s=left_s,
    )
    run("bench.gpu_plots", str(folder), timeout_s=30)
    print(f"{time.monotonic() - started:.0f} s, results in {folder}")
    if not copies or not serving:
        sys.exit(1)


if __name__ == "__main__":
    main()
