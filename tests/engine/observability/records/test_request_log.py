"""RequestLog: what a line says, files that take turns, a disk that is full or hangs, and the names of a prompt."""

import json
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from mounts import Mount
from serving import tables
from sidecars import small_config
from small_models import build, byte_tokenizer
from waiting import DEADLINE_S, wait_for

from kvtier import LLM, SamplingParams
from kvtier.engine.config import RequestLogConfig
from kvtier.engine.observability.records.request_log import (
    MAX_AT_ONCE,
    MAX_NAMES,
    MAX_WAITING,
    LogCounts,
    RequestLog,
    coarse_names,
    refuse_unusable,
)
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.trail import Trail
from kvtier.sidecar.build_sidecar import build_sidecar
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, ExtraKeys
from kvtier.tiers.naming.tier import Reason

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
RECORD = RequestRecord("a", "ann", None, 1000.0, TokenBalance(device=32, recomputed=1, reasons={Reason.LAST_BLOCK: 1}))


def trail_of(num_blocks: int, block_size: int = 16) -> Trail:
    chain = BlockChain(block_size)
    chain.extend(list(range(num_blocks * block_size)))
    return Trail(block_size, chain.names)


def lines_of(*paths: Path) -> list[dict]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def close_reading(log: RequestLog, reader: int) -> bytes:
    """What the log still writes to its pipe, whose disk is back."""
    os.set_blocking(reader, True)
    with ThreadPoolExecutor(1) as thread, os.fdopen(reader, "rb") as file:
        read = thread.submit(file.read)
        log.close()
        return read.result(DEADLINE_S)


def test_a_line_has_the_request_in_names_and_numbers(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    log = RequestLog(file, 1 << 20, 2)
    log.on_record(RECORD, trail_of(2))
    log.close()
    log.close()

    (line,) = lines_of(file)
    assert (line["id"], line["tenant"], line["arrived_at"], line["prompt_tokens"]) == ("a", "ann", 1000.0, 33)
    assert (line["device"], line["host"], line["disk"], line["recomputed"]) == (32, 0, 0, 1)
    assert line["reasons"] == {"last_block": 1}
    assert (line["grain"], line["prefix"]) == (16, [name[:8].hex() for name in trail_of(2).names])
    assert log.counts() == LogCounts(1, 0)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("num_blocks", [0, 1, MAX_NAMES, MAX_NAMES + 1, 8192, 8193])
def test_a_long_prompt_is_told_of_at_a_coarser_grain_and_a_prefix_of_it_still_agrees(num_blocks: int) -> None:
    long, short = coarse_names(trail_of(num_blocks)), coarse_names(trail_of(min(num_blocks, MAX_NAMES)))

    assert len(long[1]) <= MAX_NAMES
    assert long[0] * (len(long[1]) + 1) > num_blocks
    assert short[1][long[0] - 1 :: long[0]] == long[1][: len(short[1]) // long[0]]


def test_files_take_turns_and_the_oldest_goes(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    log = RequestLog(file, 4000, 3)
    for number in range(100):
        log.on_record(RequestRecord(str(number), None, None, 0.0, TokenBalance()), Trail(16, ()))
    log.close()

    files = [file, file.with_name("requests.jsonl.1"), file.with_name("requests.jsonl.2")]
    assert sorted(tmp_path.iterdir()) == files
    assert all(each.stat().st_size <= 4000 for each in files)
    kept = [int(line["id"]) for line in lines_of(*reversed(files))]
    assert kept == list(range(100 - len(kept), 100))
    assert 0 < len(kept) < 100


def test_a_log_goes_on_where_the_last_process_left_it(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    for _ in range(2):
        log = RequestLog(file, 1 << 20, 2)
        log.on_record(RECORD, trail_of(1))
        log.close()

    assert len(lines_of(file)) == 2


def test_a_disk_that_hangs_delays_nobody_and_what_finds_no_room_is_counted(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # reads nothing: 64 KiB fit into a pipe
    log = RequestLog(pipe, 1 << 40, 2)
    trail = trail_of(64)
    for _ in range(3 * MAX_WAITING):
        log.on_record(RECORD, trail)

    assert log.counts().num_dropped > 0
    assert log.counts().num_written < 3 * MAX_WAITING
    num_lines = close_reading(log, reader).count(b"\n")
    assert num_lines == log.counts().num_written == 3 * MAX_WAITING - log.counts().num_dropped


def test_lines_that_a_slow_disk_is_being_given_are_bounded_too(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = RequestLog(pipe, 1 << 40, 2)
    trail = trail_of(64)

    def add(num_records: int) -> int:
        num_before = log.counts().num_dropped
        for _ in range(num_records):
            log.on_record(RECORD, trail)
        return log.counts().num_dropped - num_before

    def has_written() -> bool:
        with suppress(BlockingIOError):
            os.read(reader, 1 << 16)
        return log.counts().num_written > 0

    add(3 * MAX_WAITING)
    wait_for(has_written)  # the disk takes a while's lines, and hangs again
    num_dropped = add(2 * MAX_WAITING)
    close_reading(log, reader)

    assert num_dropped >= 2 * MAX_WAITING - 3 * MAX_AT_ONCE  # one batch under way, one taken, one written


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(Path("/dev/full"), 1 << 20, 2)
    for _ in range(5):
        log.on_record(RECORD, trail_of(64))
    log.close()

    assert log.counts().num_dropped > 0
    assert len([record for record in caplog.records if "request log" in record.message]) == 1


def test_an_engine_writes_the_log_that_its_configuration_names(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    config = {**tables(), "request_log": {"path": str(file)}}
    prompt = list(range(5, 105))
    with LLM(build("llama"), config, byte_tokenizer()) as llm:
        llm.generate([prompt], GREEDY)
        llm.generate([prompt[:60]], GREEDY)

    first, second = lines_of(file)
    names = BlockChain(16, ExtraKeys())
    names.extend(prompt)
    assert first["prefix"] == [name[:8].hex() for name in names.names]
    assert second["prefix"] == first["prefix"][:3]
    assert (first["recomputed"], second["device"], second["generated"]) == (100, 59, 4)
    assert second["total_s"] >= second["ttft_s"] > 0


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("none/requests.jsonl", "there is no folder {}/none; make it, or give another path"),
        ("file/requests.jsonl", "{}/file is not a folder; give another path"),
        ("file/below/requests.jsonl", "there is no folder {}/file/below; make it, or give another path"),
        ("folder", "{}/folder is a folder; give a file in it"),
    ],
)
def test_a_log_that_cannot_be_written_is_told_in_one_line_and_nothing_is_made(
    tmp_path: Path, path: str, what: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    config = small_config(request_log={"path": str(tmp_path / path)})

    for begin in (lambda: refuse_unusable(config.request_log), lambda: build_sidecar(config, lambda *_: [])):
        with pytest.raises(OSError, match="request log") as raised:
            begin()
        assert str(raised.value) == f"request log: {what.format(tmp_path)}"
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "file", tmp_path / "folder"]


def test_a_log_where_nothing_can_be_written_is_told(tmp_path: Path, mount: Mount) -> None:
    folder = mount("-t", "tmpfs", "-o", "size=1m", "tmpfs")
    (folder / "there.jsonl").touch()
    mount("-o", "remount,ro")

    for name, what in (("new.jsonl", folder), ("there.jsonl", folder / "there.jsonl")):
        config = RequestLogConfig(path=str(folder / name))
        with pytest.raises(OSError, match=f"request log: this user may not write {what}; give another path"):
            refuse_unusable(config)


def test_a_folder_that_goes_while_lines_are_written_costs_lines_and_is_not_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "folder" / "requests.jsonl"
    file.parent.mkdir()
    log = RequestLog(file, 1, 2)  # each line begins a file
    log.on_record(RECORD, trail_of(1))
    wait_for(lambda: log.counts().num_written == 1)
    shutil.rmtree(file.parent)
    log.on_record(RECORD, trail_of(1))
    wait_for(lambda: log.counts().num_dropped == 1)
    file.parent.mkdir()
    log.on_record(RECORD, trail_of(1))
    log.close()

    assert len(lines_of(file)) == 1
    assert [record.message for record in caplog.records if "request log" in record.message] == [
        f"request log: {file} cannot be written ([Errno 2] No such file or directory: '{file}'); "
        "lines are dropped until it can"
    ]


def test_names_are_bytes_of_a_digest_and_no_token_is_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    log = RequestLog(file, 1 << 20, 1)
    log.on_record(RECORD, Trail(16, [BlockName(bytes(range(32)))]))
    log.close()

    (line,) = lines_of(file)
    assert line["prefix"] == [bytes(range(8)).hex()]
    assert "names" not in line
    assert "tokens" not in line
