"""The disk as configured: codecs, encryption, levels, quotas and budgets, through the whole engine and a restart."""

import time
from pathlib import Path
from typing import Any

import pytest
from small_models import VOCAB, build, byte_tokenizer
from waiting import DEADLINE_S

from kvtier import LLM, SamplingParams
from kvtier.engine.config import DiskConfig
from kvtier.engine.llm import Completion
from kvtier.engine.observability.metrics.collector import EngineCollector
from kvtier.engine.stores.disk_store import codec_of, disk_tier, store_settings, with_rounding_of
from kvtier.engine.stores.reopening_store import ReopeningStore
from kvtier.tiers.naming.namespace import Namespace
from kvtier.tiers.naming.tier import Reason

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 1024
PROMPT = [(7 * i + 3) % VOCAB for i in range(200)]
FOUND = 192  # of its tokens, on whole blocks


def llm_of(folder: Path, disk: dict[str, Any], **tables: Any) -> LLM:
    settings = {
        "device": {"capacity": 60 * BLOCK_BYTES, "block_size": BLOCK_SIZE},
        "host": {"capacity": 200 * BLOCK_BYTES},
        "disk": {"path": str(folder / "store"), "capacity": "64MiB", **disk},
        "scheduler": {"load": "always"},
        **tables,
    }
    return LLM(build("llama"), settings, byte_tokenizer())


def ask(llm: LLM, prompt: list[int] = PROMPT, salt: str | None = None) -> Completion:
    (completion,) = llm.generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True), cache_salt=salt)
    return completion


def metrics_of(llm: LLM) -> dict[tuple[str, ...], float]:
    collector = EngineCollector(llm.statistics)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in collector.collect()
        for sample in metric.samples
    }


@pytest.mark.parametrize("level", ["process", "interval", "commit"])
@pytest.mark.parametrize("codec", ["none", "zstd", "auto"])
def test_a_restart_is_warm_and_exact(tmp_path: Path, codec: str, level: str) -> None:
    disk = {"codec": codec, "durability": level}
    with llm_of(tmp_path, disk) as llm:
        cold = ask(llm)
    with llm_of(tmp_path, disk) as llm:
        warm = ask(llm)
    assert warm.tokens.disk == FOUND
    assert warm.token_ids == cold.token_ids


def test_fp8_is_found_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    with llm_of(tmp_path, {"codec": "fp8"}) as llm:
        ask(llm)
    with llm_of(tmp_path, {}) as llm:
        assert ask(llm).tokens.disk == 0
    with llm_of(tmp_path, {"codec": "fp8"}) as llm:
        assert ask(llm).tokens.disk == FOUND


def test_a_disk_that_rounds_is_refused_in_a_namespace_of_exact_blocks(tmp_path: Path) -> None:
    exact = Namespace("m", "c", "w", "torch.float32", (), BLOCK_SIZE, "sha256", "kvtier")
    config = DiskConfig(path=str(tmp_path / "store"), capacity=64 << 20, codec="fp8")
    store = ReopeningStore(store_settings(config, codec_of(config, exact.dtype)), [])
    try:
        with pytest.raises(ValueError, match=r"codec fp8 does not fit a namespace with kv_quantization 'none'"):
            disk_tier(store, config, exact)
        disk_tier(store, config, with_rounding_of(exact, config))
    finally:
        store.close()


def test_encrypted_blocks_are_found_with_their_key_only(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"key{number}").write_text(f"{number}" * 64)
        (tmp_path / f"key{number}").chmod(0o600)
    own = {"encryption_key_file": str(tmp_path / "key1")}
    with llm_of(tmp_path, own) as llm:
        cold = ask(llm)
    for others in ({"encryption_key_file": str(tmp_path / "key0")}, {}):
        with llm_of(tmp_path, others) as llm:
            answer = ask(llm)
            assert answer.tokens.disk == 0
            assert set(answer.tokens.reasons) <= {Reason.NEVER_SEEN, Reason.LAST_BLOCK}, "they are not known here"
    with llm_of(tmp_path, {"encryption_key_command": f"cat {tmp_path / 'key1'}"}) as llm:
        warm = ask(llm)
    assert warm.tokens.disk == FOUND
    assert warm.token_ids == cold.token_ids


def test_the_command_for_the_key_runs_once_a_start(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("1" * 64)
    command = f"sh -c 'echo run >>{tmp_path / 'runs'}; cat {tmp_path / 'key'}'"

    with llm_of(tmp_path, {"encryption_key_command": command}):
        pass

    assert (tmp_path / "runs").read_text() == "run\n"


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("1" * 64)
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        llm_of(tmp_path, {"encryption_key_file": str(tmp_path / "key")})


def test_the_folder_stays_within_its_capacity(tmp_path: Path) -> None:
    with llm_of(tmp_path, {"capacity": "12MiB"}) as llm:
        for first in range(60):
            ask(llm, [(first + i) % VOCAB for i in range(200)])
    folder = tmp_path / "store"
    assert sum(file.stat().st_blocks * 512 for file in folder.iterdir()) <= 12 << 20


def test_quotas_of_tenants_and_their_metrics(tmp_path: Path) -> None:
    tenants = {"secret-a": {"host": 3 * BLOCK_BYTES, "disk": 200_000, "name": "ann"}, "secret-b": {"disk": "1MiB"}}
    with llm_of(tmp_path, {"endurance": "600TB"}, tenants=tenants) as llm:
        ask(llm, salt="secret-a")
        ask(llm, salt="secret-b")
        for first in range(1, 9):
            ask(llm, [(first * 31 + 5 * i) % VOCAB for i in range(200)])
        deadline = time.monotonic() + DEADLINE_S
        while True:
            values = metrics_of(llm)
            if values["kvtier_tenant_bytes", "disk", "ann"] > 0 < values["kvtier_disk_written_bytes_total",]:
                break
            assert time.monotonic() < deadline, "nothing was written to disk"
            ask(llm, PROMPT[:40])

        assert 0 < values["kvtier_tenant_bytes", "host", "ann"] <= 3 * BLOCK_BYTES
        assert 0 < values["kvtier_tenant_bytes", "disk", "ann"] <= 200_000
        assert "secret" not in repr(values)
        assert values["kvtier_disk_breaker", "read", "closed"] == 1
        assert values["kvtier_disk_file_bytes",] > 0
        assert 0 < values["kvtier_ssd_life_used_ratio",] < 1e-3
        assert values["kvtier_disk_index_loaded",] == 1


def test_a_budget_of_nothing_writes_nothing(tmp_path: Path) -> None:
    with llm_of(tmp_path, {"max_written_bytes_per_day": 0}) as llm:
        for first in range(1, 9):
            ask(llm, [(first * 31 + 5 * i) % VOCAB for i in range(200)])
        values = metrics_of(llm)
        assert values["kvtier_disk_written_bytes_total",] == 0
        assert values["kvtier_disk_admission_blocks_total", "refused"] > 0
        assert values["kvtier_disk_budget_left_bytes",] == 0
