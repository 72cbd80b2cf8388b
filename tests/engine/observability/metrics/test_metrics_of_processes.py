"""Numbers of an engine with a process of the store's: one `/metrics` has them all, and no counter goes back."""

import os
import random
import signal
from pathlib import Path

import pytest
from foreign.running import Sidecar
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from served_config import configured
from serving import chat_tokenizer, serving_process
from small_models import VOCAB, build, byte_tokenizer
from transformers import PreTrainedModel
from waiting import wait_for

from kvtier import LLM, SamplingParams
from kvtier.engine.observability.metrics.collector import EngineCollector

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 1024  # of every small model
GREEDY = SamplingParams(max_tokens=2, ignore_eos=True)

Counters = dict[tuple[str, frozenset[tuple[str, str]]], float]


def llm_of(model: PreTrainedModel, folder: Path) -> LLM:
    config = {
        "device": {"capacity": 24 * BLOCK_BYTES, "block_size": BLOCK_SIZE},
        "host": {"capacity": 24 * BLOCK_BYTES},
        "disk": {"path": str(folder / "store"), "capacity": "64MiB"},
        "scheduler": {"prefill_chunk": 64, "token_budget": 128, "load": "always"},
        "metrics": {"compat": ["vllm", "lmcache"]},
    }
    return LLM(model, config, byte_tokenizer())


def ask(llm: LLM, seed: int) -> None:
    """Fill every tier, and push blocks out of the upper ones."""
    rng = random.Random(seed)
    for _ in range(8):
        llm.generate([rng.randrange(VOCAB) for _ in range(120)], GREEDY)


def counters(llm: LLM) -> Counters:
    registry = CollectorRegistry()
    registry.register(EngineCollector(llm.statistics, ("vllm", "lmcache"), "m"))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if family.type in ("counter", "histogram")
    }


def kill_store() -> None:
    """Kill the store's processes that this process has."""
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            if "store_server" in Path(f"/proc/{child}/cmdline").read_text():
                os.kill(int(child), signal.SIGKILL)


def test_no_counter_goes_back_when_the_stores_process_ends_and_another_one_goes_on(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    with llm_of(model, tmp_path) as llm:
        ask(llm, seed=1)
        before = counters(llm)
        kill_store()

        def is_written_again() -> bool:
            ask(llm, seed=random.randrange(1 << 30))
            now = counters(llm)
            assert [key for key, value in before.items() if now[key] < value] == []
            written = ("kvtier_disk_written_bytes_total", frozenset[tuple[str, str]]())
            return now[written] > before[written] and now["kvtier_disk_process_ended_total", frozenset()] == 1

        wait_for(is_written_again)


def test_what_was_written_since_the_store_was_made_outlives_the_engine_and_all_else_begins_at_0(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    with llm_of(model, tmp_path) as llm:
        ask(llm, seed=1)
        first = counters(llm)
    with llm_of(model, tmp_path) as llm:
        second = counters(llm)

    of_the_store = {"kvtier_disk_written_bytes_total", "kvtier_evicted_blocks_total"}
    not_zero = {name for (name, _), value in second.items() if value and not name.startswith("process_")}
    (written,) = [key for key in first if key[0] == "kvtier_disk_written_bytes_total"]
    assert second[written] >= first[written] > 0
    assert not_zero <= of_the_store | {"kvtier_moved_seconds_total"}


def children_of(pid: int) -> list[str]:
    """The commands of the processes that the process has started, however deep."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [Path(f"/proc/{child}/cmdline").read_text(), *children_of(int(child))]
    return found


@pytest.mark.long
def test_a_server_and_a_sidecar_have_one_process_beside_their_own_the_stores(tmp_path: Path) -> None:
    model = tmp_path / "model"
    build("llama").save_pretrained(model)
    chat_tokenizer().save_pretrained(model)
    options = ["--host", "64MiB", "--disk", f"{tmp_path / 'shared'}:64MiB"]
    with (
        serving_process(tmp_path, model, configured(tmp_path)) as server,
        Sidecar(f"ipc://{tmp_path / 'endpoint.sock'}", *options) as sidecar,
    ):
        server.complete("Hello", max_tokens=2)
        found = [children_of(process.pid) for process in (server.process, sidecar.process)]

    assert [len(commands) for commands in found] == [1, 1]
    assert all("store_server" in command for commands in found for command in commands)
