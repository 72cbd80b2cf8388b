"""`kvtier forget-remote`: what it deletes, what it leaves, and what it asks before."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_cases import REMOTES, empty_remote
from small_models import build, byte_tokenizer

from kvtier.cli.main import main
from kvtier.engine.build_core import build_core
from kvtier.engine.config import RemoteConfig, as_config
from kvtier.engine.stores.remote_store import remote_store
from kvtier.store.remote_store import RemoteRecord
from kvtier.tiers.lower.name_set import block_key
from kvtier.tiers.naming.block_hash import BlockName

OURS, OTHERS = bytes(range(16)), bytes(range(16, 32))


@pytest.fixture(params=REMOTES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with empty_remote(request.param, tmp_path) as url:
        yield url


def keys(namespace: bytes) -> list[bytes]:
    return [block_key(namespace, 0, BlockName(bytes([number]) * 32)) for number in range(5)]


def fill(url: str) -> None:
    with remote_store(RemoteConfig(url=url)) as store:
        for namespace in (OURS, OTHERS):
            records = [RemoteRecord(key, b"head", memoryview(bytes(1000))) for key in keys(namespace)]
            assert all(store.put_many(records))


def num_there(url: str, namespace: bytes) -> int:
    with remote_store(RemoteConfig(url=url)) as store:
        return sum(store.exist_many(keys(namespace), apart=True))


def test_the_named_namespace_is_deleted_and_others_stay(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    fill(url)

    assert main(["forget-remote", url, "--namespace", OURS.hex(), "--yes"]) == 0

    assert (num_there(url, OURS), num_there(url, OTHERS)) == (0, 5)
    assert f"deleted {OURS.hex()} in" in capsys.readouterr().out


def test_without_a_terminal_or_yes_nothing_is_deleted(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    fill(url)

    assert main(["forget-remote", url, "--namespace", OURS.hex()]) == 2

    assert num_there(url, OURS) == 5
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.endswith("there is no terminal to ask on; add --yes\n")


@pytest.mark.parametrize("name", ["3f2a", OURS.hex() + "00", "g" * 32, ""])
def test_a_part_of_a_name_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["forget-remote", f"file://{tmp_path}", "--namespace", name, "--yes"])

    assert ended.value.code == 2
    assert "give all of its 32 hexadecimal digits" in capsys.readouterr().err


def test_an_engine_logs_the_name_that_its_blocks_have_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"file://{tmp_path}/objects"
    tables = {"device": {"capacity": "320KiB"}, "remote": {"url": url}, "model": {"dtype": "float32"}}
    caplog.set_level("INFO")

    with build_core(build("llama"), byte_tokenizer(), as_config(tables)) as core:
        namespace = core.namespace.hex()

    (said,) = [text for text in caplog.messages if "blocks are put into" in text]
    assert re.fullmatch(rf"remote: blocks are put into {re.escape(url)} under namespace {namespace}", said)
