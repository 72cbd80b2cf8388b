"""`kvtier bench-remote`: what it measures, what it says of it, and that it leaves nothing behind."""

import json
from pathlib import Path

import pytest
from memory_remote import MemoryRemote
from redis_servers import running_server
from remote_cases import needs_redis

from kvtier.cli import remote
from kvtier.cli.main import main
from kvtier.cli.remote import Measured, measure, min_tokens, tokens_per_s
from kvtier.store.remote.sealed_remote import SealedRemote

SMALL = ("--block", "64KiB", "--blocks", "20")
FOUND = Measured("there", 1 << 20, 10, 1e-3, 2e-3, 1e9, 2.9e9, 0)


def test_a_folder_is_measured_and_left_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-remote", f"file://{tmp_path}", *SMALL, "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert (found["num_blocks"], found["block_bytes"], found["num_wrong"]) == (20, 64 << 10, 0)
    assert min(found["ask_s"], found["put_bytes_per_s"], found["read_bytes_per_s"]) > 0
    assert set(found["pays_below_tokens_per_s"]) == set(remote.MODELS)
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


@needs_redis
def test_a_redis_is_measured_and_left_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_server(tmp_path) as redis:
        url = f"redis://{redis.address}"

        assert main(["bench-remote", url, *SMALL, "--token-bytes", "128KiB", "--prefill", "1"]) == 0

        said = capsys.readouterr().out
        assert said.startswith(f"{url}: 20 blocks of 64.0 KiB, verified")
        assert "with a prefill of 1 tokens/s: loading pays off from 1 tokens of prefix" in said
        assert redis.ask("DBSIZE") == 0


def test_a_store_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-remote", "redis://127.0.0.1:1", *SMALL]) == 2

    said = capsys.readouterr().err
    assert said.startswith("kvtier: ")
    assert "127.0.0.1:1" in said
    assert said.count("\n") == 1


def test_an_address_that_is_none_says_how_one_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-remote", "http://cache:6379"]) == 2

    assert "redis://HOST:6379" in capsys.readouterr().err


def test_blocks_that_come_back_wrong_are_counted() -> None:
    class Forgetful(MemoryRemote):
        def put_many(self, records):
            return super().put_many(records[1:]) and [True] * len(records)

    assert measure(SealedRemote(Forgetful()), b"n" * 16, 4096, 8, 2).num_wrong == 1


def test_the_break_even_is_that_of_the_arithmetic() -> None:
    # An 8B model has 128 KiB a token; an H100 computes 22,000 tokens a second of it: 2.9 GB/s are just enough.
    assert tokens_per_s(FOUND, 128 << 10) == pytest.approx(22_125, rel=0.01)
    assert min_tokens(FOUND, 128 << 10, 22_200) is None
    assert min_tokens(FOUND, 128 << 10, 10_000) == pytest.approx(2e-3 / (1e-4 - 45.2e-6), rel=0.01)
