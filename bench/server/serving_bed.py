"""Starts servers to measure, each in a process of its own on a free loopback port, for the time of a block."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.cli.demo.model import MAX_POSITIONS, build_tokenizer

START_S = 180.0
END_S = 120.0
BLOCK_SIZE = 32
# For every server: freed pages may go back to the virtual machine's host, and touching them again is the largest noise.
KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
# `kvtier serve` sets this itself, unless it is started by a module that loads torch before: threads that spin.
SPINS_BRIEFLY = {"GOMP_SPINCOUNT": "1000"}
NUM_LAYERS, NUM_KV_HEADS = 6, 2
HEAD_DIM = 64  # that vLLM's attention on CPUs supports
MODEL = "model"  # its name in the API of each server


def save_model(folder: Path) -> tuple[Path, int, int]:
    """Save a model that every server can load; returns its folder, its bytes of KV a token, and its vocabulary's size.

    A Llama of 19 million random weights, drawn so that its answers are words in no order, with the demo's tokenizer.
    """
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:  # else it is a norm's
                weight.normal_(std=1.0 if "embed" in name else 2 / weight.shape[1] ** 0.5, generator=generator)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, 2 * 4 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM, len(tokenizer)


@contextmanager
def kvtier_server(
    model: Path,
    folder: Path,
    tables: Mapping[str, Mapping[str, object]],
    options: Sequence[str] = (),
    module: str = "kvtier.cli.main",
) -> Iterator[str]:
    """Run `kvtier serve` with the configuration *tables* and *options*; gives its URL. *module* is run in its place."""
    port = _free_port()
    config = folder / f"server-{port}.toml"
    config.write_text("\n".join(_toml(name, table) for name, table in tables.items()))
    command = [
        sys.executable,
        "-m",
        module,
        "serve",
        "--model",
        str(model),
        "--config",
        str(config),
    ]
    command += ["--port", str(port), "--model-name", MODEL, *options]
    with _process(command, port, "/ready", folder, SPINS_BRIEFLY) as url:
        yield url


@contextmanager
def vllm_server(
    python: Path,
    model: Path,
    folder: Path,
    capacity: int,
    max_model_len: int,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[str]:
    """Run vLLM's server with *capacity* bytes of prefix cache; *python* belongs to an environment with vLLM, and
    *environment* has settings of vLLM."""
    port = _free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
    command += ["--enable-prefix-caching", "--kv-cache-memory-bytes", str(capacity)]
    command += ["--max-model-len", str(max_model_len), "--max-num-seqs", "64", "--disable-uvicorn-access-log"]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with _process(command, port, "/health", folder, {**offline, **environment}) as url:
        yield url


@contextmanager
def _process(
    command: Sequence[str], port: int, path: str, folder: Path, environment: Mapping[str, str]
) -> Iterator[str]:
    """Run a server for the time of a block; gives its URL once *path* answers. RuntimeError with its log if it ends."""
    url, log = f"http://127.0.0.1:{port}", folder / f"server-{port}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **KEEPS_MEMORY, **environment}, start_new_session=True
        )
        try:
            _wait_until_it_answers(process, url + path, log)
            yield url
        finally:
            _end(process, out)


def _wait_until_it_answers(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2.0):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} did not start: {log.read_text()[-2000:]}")


def _end(process: subprocess.Popen[bytes], out: IO[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        out.write("ended with SIGKILL\n")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _toml(name: str, table: Mapping[str, object]) -> str:
    return "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items()), ""])
