"""`kvtier check`, `stats`, `store ls` and `store rm` on real stores: whole ones, damaged ones, and ones in use."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from store_index import changed_index

from kvtier.cli.main import main
from kvtier.cli.subprocess_call import Crashed, call_in_process, iterate_in_process
from kvtier.engine.config import size_text
from kvtier.store.blob_store import Blob
from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.seal import charged_bytes
from kvtier.store.durability import Durability
from kvtier.store.lmdb import upkeep
from kvtier.store.lmdb.boot_mark import BootMark, FileState, current_boot_id
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.lmdb.tables import COUNTERS_KEY, RecordRow
from kvtier.store.lmdb.upkeep import Tally, Verification
from kvtier.store.record import Fault, Record, digest

CAPACITY_BYTES = 10 << 20
PATIENCE_S = 60.0  # reached only when a test fails
BLOCK_BYTES = 8192
CHARGED_KIB = charged_bytes(BLOCK_BYTES) / 1024
A, B, C = b"namespace number", b"namespace-number", b"model-A layout-1"
NUM_MANY = 20_000
MANY_BLOCK_BYTES = 4096
MANY_CAPACITY_BYTES = 100 << 20

# Keeps the store open until its input ends.
OWNER = """
import sys
from pathlib import Path
from kvtier.store.lmdb.lmdb_store import LmdbStore

with LmdbStore(Path(sys.argv[1])):
    print("open", flush=True)
    sys.stdin.read()
"""


def key_of(number: int, namespace: bytes) -> bytes:
    return namespace + number.to_bytes(32, "big")


def blob_of(number: int, namespace: bytes, num_bytes: int = BLOCK_BYTES) -> Blob:
    raw = np.random.default_rng(number).bytes(num_bytes)
    return Blob(key_of(number, namespace), digest(raw), memoryview(raw))


def fill(folder: Path, counts: dict[bytes, int], cipher: Cipher | None = None) -> Path:
    """A store with that many records in each namespace, numbered from 0."""
    with LmdbStore(folder, CAPACITY_BYTES, cipher=cipher) as store:
        for namespace, count in counts.items():
            store.put_many([blob_of(number, namespace) for number in range(count)])
    return folder


def damage(folder: Path, fault: Fault, *keys: bytes) -> None:
    """Change the headers of the records of *keys* so that reading them meets with *fault*."""
    with changed_index(folder) as (txn, tables):
        for key in keys:
            packed = txn.get(key, db=tables.records)
            assert packed is not None
            row = RecordRow.unpack(key, packed)
            header = row.header
            record = Record.unpack(key, header)
            assert isinstance(record, Record)
            told = {
                "namespace": bytes(16) if fault is Fault.FOREIGN else record.namespace,
                "stored_length": record.stored_length + (1 << 20 if fault is Fault.TORN else 0),
                "digest": bytes(16) if fault is Fault.CORRUPT and any(record.digest) else bytes(15) + b"1",
            }
            fields = {"codec_id": record.codec_id, "raw_length": record.raw_length}
            fields |= {"cipher_id": record.cipher_id, "key_id": record.key_id}
            other = Record(**told, **fields).pack(key)
            if fault is Fault.VERSION:
                other = header[:4] + b"\x63\x00" + header[6:]
            txn.put(key, row._replace(header=other).pack(key), db=tables.records)


def flip_a_byte(folder: Path, raw: memoryview) -> None:
    """On the disk, in the middle of where *raw* is stored."""
    for path in folder.iterdir():
        place = path.read_bytes().find(raw)
        if place >= 0:
            with path.open("r+b") as file:
                file.seek(place + len(raw) // 2)
                file.write(bytes([raw[len(raw) // 2] ^ 1]))
            return
    raise AssertionError("it is not there")


def content_of(folder: Path) -> list[bytes]:
    """The keys of records that verify; AssertionError if the store is not whole."""
    with LmdbStore(folder) as store:
        store.check()
        return sorted(key for key, fault in store.verify() if fault is None)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run the command: its exit status, stdout and stderr."""
    capsys.readouterr()
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


def json_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    status, out, err = run(capsys, *arguments, "--json")
    assert (status in (0, 1), err) == (True, "")
    told = json.loads(out)
    assert isinstance(told, dict)
    return told


def start(*arguments: object, **options: object) -> "subprocess.Popen[str]":
    """The command in a process group of its own, as from a terminal's shell."""
    command = [sys.executable, "-m", "kvtier.cli.main", *map(str, arguments)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options

    def heed_signals() -> None:  # this process may have been started in the background, where Ctrl-C is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    options = {"text": True, "start_new_session": True, "preexec_fn": heed_signals, **pipes}
    return subprocess.Popen(command, **options)  # type: ignore[call-overload, no-any-return]


@contextmanager
def owner_of(folder: Path) -> "Iterator[subprocess.Popen[str]]":
    """Run a process that has the store open."""
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        yield owner
        owner.communicate(timeout=PATIENCE_S)


def wait_until_open(folder: Path, check: "subprocess.Popen[str]") -> None:
    """Wait until the check has the store open, or has ended."""
    while BootMark.read(folder) != BootMark(current_boot_id(), FileState.COMMIT) and check.poll() is None:
        time.sleep(0.002)


def rows_of(out: str) -> dict[str, list[str]]:
    """The rows of a printed table, by the name that each begins with."""
    words = [line.split() for line in out.splitlines()]
    return {row[0]: row[1:] for row in words if row and re.fullmatch("[0-9a-f]{32}|namespace|all", row[0])}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return fill(tmp_path / "store", {A: 12, B: 7, C: 1})


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with many small records; not to be changed."""
    folder = tmp_path_factory.mktemp("many") / "store"
    raw = bytes(MANY_BLOCK_BYTES)
    known = digest(raw)
    with LmdbStore(folder, MANY_CAPACITY_BYTES) as store:
        for first in range(0, NUM_MANY, 500):
            numbers = range(first, first + 500)
            store.put_many([Blob(key_of(n, (A, B)[n % 2]), known, memoryview(raw)) for n in numbers])
    return folder


# check


def test_check_finds_nothing_wrong_with_a_fine_store(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    status, out, err = run(capsys, "check", store)

    assert (status, err) == (0, "")
    assert "20 records verified, 160.0 KiB" in out
    assert "agrees with a full count" in out
    assert rows_of(out)[A.hex()] == ["12", "96.0", "KiB", "12"]
    assert rows_of(out)[B.hex()] == ["7", "56.0", "KiB", "7"]
    assert rows_of(out)["all"] == ["20", "160.0", "KiB", "20"]
    assert BootMark.read(store) == BootMark(current_boot_id(), FileState.CLEAN)


@pytest.mark.parametrize("fault", [Fault.CORRUPT, Fault.TORN, Fault.FOREIGN, Fault.VERSION])
def test_check_reports_a_bad_record_by_cause_and_namespace_and_leaves_it(
    capsys: pytest.CaptureFixture[str], store: Path, fault: Fault
) -> None:
    damage(store, fault, key_of(3, B))

    status, out, _ = run(capsys, "check", store)

    assert status == 1
    assert rows_of(out)["namespace"][-1] == fault
    assert rows_of(out)[B.hex()][-2:] == ["6", "1"]
    assert rows_of(out)[A.hex()][-2:] == ["12", "0"]
    assert "1 bad records: --fix deletes them" in out
    assert json_of(capsys, "check", store)["faults"] == {fault: 1}
    with LmdbStore(store) as opened:
        assert opened.contains(key_of(3, B))


def test_check_finds_a_bit_that_flipped_on_the_disk(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    flip_a_byte(store, blob_of(5, A).raw)

    told = json_of(capsys, "check", store)

    assert told["faults"] == {"corrupt": 1}
    assert run(capsys, "check", store, "--fix")[0] == 0
    assert key_of(5, A) not in content_of(store)


def test_check_fix_deletes_all_bad_records_and_only_these(
    capsys: pytest.CaptureFixture[str], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {key_of(1, A): Fault.CORRUPT, key_of(2, A): Fault.TORN, key_of(3, B): Fault.FOREIGN, key_of(0, C): Fault.TORN}
    for key, fault in bad.items():
        damage(store, fault, key)
    with LmdbStore(store) as opened:
        fine = sorted(set(opened.keys()) - bad.keys())

    status, out, err = run(capsys, "check", store, "--fix")

    assert (status, err) == (0, "")
    assert "4 bad records deleted" in out
    assert content_of(store) == fine
    assert run(capsys, "check", store)[0] == 0


@pytest.mark.long
def test_check_fix_deletes_more_than_one_change_of_the_store_takes(
    capsys: pytest.CaptureFixture[str], many: Path, tmp_path: Path
) -> None:
    store = Path(shutil.copytree(many, tmp_path / "store"))
    damage(store, Fault.TORN, *(key_of(number, A) for number in range(0, 3000, 2)))

    told = json_of(capsys, "check", store, "--fix")

    assert (told["bad"], told["deleted"], told["miscount"]) == (1500, 1500, None)
    assert len(content_of(store)) == NUM_MANY - 1500


def test_check_says_that_the_accounting_is_wrong_and_fix_that_it_is_right_again(
    capsys: pytest.CaptureFixture[str], store: Path
) -> None:
    damage(store, Fault.TORN, key_of(3, B))
    with changed_index(store) as (txn, tables):
        packed = txn.get(key_of(3, B), db=tables.records)
        assert packed is not None
        row = RecordRow.unpack(key_of(3, B), packed)._replace(parent=key_of(2, B))  # which is older
        txn.put(key_of(3, B), row.pack(key_of(3, B)), db=tables.records)

    status, out, _ = run(capsys, "check", store)
    fixed_status, fixed_out, _ = run(capsys, "check", store, "--fix")

    assert (status, fixed_status) == (1, 0)
    assert "a record would be evicted before its child" in out
    assert "agrees with a full count" in fixed_out


def test_check_says_that_the_accounting_is_wrong_where_every_record_is_fine(
    capsys: pytest.CaptureFixture[str], store: Path
) -> None:
    with changed_index(store) as (txn, tables):
        counters = tables.counters(txn)
        counters.num_records += 1
        txn.put(COUNTERS_KEY, counters.pack(), db=tables.ledger)

    status, out, _ = run(capsys, "check", store, "--fix")

    assert status == 1
    assert "num_records is 21, recount 20" in out


@pytest.mark.long
def test_check_of_many_records_counts_them_all(capsys: pytest.CaptureFixture[str], many: Path) -> None:
    told = json_of(capsys, "check", many)

    assert (told["records"], told["stored_records"], told["read_bytes"]) == (
        NUM_MANY,
        NUM_MANY,
        MANY_BLOCK_BYTES * NUM_MANY,
    )
    half = {"records": NUM_MANY // 2, "read_bytes": MANY_BLOCK_BYTES * NUM_MANY // 2, "faults": {}}
    assert told["namespaces"] == [{"namespace": namespace.hex(), **half} for namespace in (A, B)]


@pytest.mark.long
def test_check_of_a_sample_reads_that_many_and_others_each_time(
    capsys: pytest.CaptureFixture[str], many: Path, tmp_path: Path
) -> None:
    store = Path(shutil.copytree(many, tmp_path / "store"))
    damage(store, Fault.TORN, *(key_of(number, A) for number in range(0, NUM_MANY, 4)))

    told = [json_of(capsys, "check", store, "--sample", 400) for _ in range(4)]

    assert [each["records"] for each in told] == [400] * 4
    bad = [each["bad"] for each in told]
    assert len(set(map(str, bad))) > 1
    assert all(isinstance(count, int) and 40 < count < 170 for count in bad)  # 100 are expected, deviation 9
    assert run(capsys, "check", store, "--sample", 400)[1].count("400 records of 20,000, a sample, verified") == 1


def test_a_sample_takes_each_record_as_often_as_the_others() -> None:
    keys = [bytes([n]) for n in range(10)]
    counts: Counter[bytes] = Counter()

    for _ in range(2000):
        sample = upkeep.sample_of(iter(keys), 3)
        assert sample == sorted(set(sample))
        counts.update(sample)

    assert all(480 < counts[key] < 720 for key in keys)  # 600 are expected, deviation 20


@pytest.mark.parametrize("num", [20, 21, 1000])
def test_a_sample_of_more_than_there_is_is_everything(
    capsys: pytest.CaptureFixture[str], store: Path, num: int
) -> None:
    assert json_of(capsys, "check", store, "--sample", num)["records"] == 20


def test_check_verifies_encrypted_records_with_their_key_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(bytes(range(32)))
    key_file.chmod(0o600)
    store = fill(tmp_path / "store", {A: 4}, Cipher.from_file(key_file))
    damage(store, Fault.CORRUPT, key_of(2, A))

    told = json_of(capsys, "check", store, "--key-file", key_file)
    status, out, err = run(capsys, "check", store, "--fix")

    assert told["faults"] == {"corrupt": 1}
    assert status == 2
    assert "none of the 4 records can be verified with this key" in err
    assert rows_of(out)["namespace"][-2:] == ["other", "key"]
    with LmdbStore(store) as opened:
        assert opened.statistics().num_records == 4


def test_records_under_another_key_are_reported_and_kept_beside_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    store = fill(tmp_path / "store", {A: 4}, Cipher(bytes(32)))
    fill(store, {B: 2})

    status, out, err = run(capsys, "check", store, "--fix")

    assert (status, err) == (0, "")
    assert "4 records have another encryption key" in out
    with LmdbStore(store) as opened:
        assert opened.statistics().num_records == 6


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--key-file", "/no/such/key"], "/no/such/key"),
        (["--sample", "0"], "--sample"),
        (["--sample", "all"], "'all' is not a number of records; give 1 or more"),
    ],
)
def test_a_mistake_in_the_options_of_check_is_one_line(
    capsys: pytest.CaptureFixture[str], store: Path, options: list[str], named: str
) -> None:
    status, out, err = run(capsys, "check", store, *options)

    assert (status, out) == (2, "")
    assert named in err
    assert len(err.splitlines()) == 1


def test_check_of_a_store_in_use_names_the_process(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    with owner_of(store) as owner:
        status, out, err = run(capsys, "check", store)

    assert (status, out) == (2, "")
    assert f"open in process {owner.pid};" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", [["check"], ["stats"], ["store", "ls"], ["store", "rm", "--all"]])
def test_a_folder_without_a_store_is_one_line_and_stays_empty(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]
) -> None:
    status, out, err = run(capsys, *command, tmp_path)

    assert (status, out) == (2, "")
    assert f"no store in {tmp_path}; give" in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mark", "reason"),
    [
        (BootMark("earlier-boot", FileState.PROCESS), "the machine went down while it was open"),
        (BootMark(current_boot_id(), FileState.DAMAGED), "its index was found damaged"),
        (BootMark(current_boot_id(), FileState.CLEAN, layout="kvtier-store-0"), "its layout is kvtier-store-0"),
    ],
)
def test_check_says_why_a_store_would_start_empty_and_does_not_touch_it(
    capsys: pytest.CaptureFixture[str], store: Path, mark: BootMark, reason: str
) -> None:
    mark.write(store)
    before = (store / "data.mdb").read_bytes()

    status, out, err = run(capsys, "check", store, "--fix")

    assert (status, out) == (1, "")
    assert reason in err
    assert "starts empty" in err
    assert len(err.splitlines()) == 1
    assert (store / "data.mdb").read_bytes() == before
    assert BootMark.read(store) == mark


def test_check_tells_of_a_store_that_went_back_to_its_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=3600) as store:
        store.put_many([blob_of(1, A)])
        store.sync()
    BootMark("earlier-boot", FileState.INTERVAL).write(tmp_path)

    status, out, err = run(capsys, "check", tmp_path)

    assert (status, err) == (0, "")
    assert "it went back to its last checkpoint" in out
    assert content_of(tmp_path) == [key_of(1, A)]


def test_a_crash_of_the_machine_during_a_check_costs_nothing(many: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(many, tmp_path / "store"))
    with iterate_in_process(upkeep.verify_store, store, os.getpid()) as items:
        while next(items) != upkeep.Progress("counting"):
            pass
        mark = BootMark.read(store)
        assert mark is not None
        after = Path(shutil.copytree(store, tmp_path / "after"))
    BootMark("earlier-boot", mark.state).write(after)

    with LmdbStore(after) as opened:
        assert opened.statistics().num_records == NUM_MANY


@pytest.mark.parametrize("command", [["check"], ["stats"], ["store", "ls"], ["store", "rm", "--all", "--yes"]])
def test_a_store_whose_tree_would_crash_the_reader_is_said_to_be_damaged(
    capsys: pytest.CaptureFixture[str], store: Path, command: list[str]
) -> None:
    os.truncate(store / "data.mdb", 8192)  # of which the roots know nothing

    status, out, err = run(capsys, *command, store)

    assert (status, out) == (1, "")
    assert "is damaged" in err
    assert "a root of its index makes no sense" in err
    assert len(err.splitlines()) == 1
    assert BootMark.read(store) == BootMark(current_boot_id(), FileState.CLEAN)


def test_check_fix_has_a_store_that_crashes_its_reader_start_empty(
    capsys: pytest.CaptureFixture[str], store: Path
) -> None:
    os.truncate(store / "data.mdb", 8192)

    status, out, err = run(capsys, "check", store, "--fix", "--json")

    assert status == 1
    assert json.loads(out)["damage"] in err
    assert "starts empty" in err
    assert BootMark.read(store) == BootMark(current_boot_id(), FileState.DAMAGED)
    with LmdbStore(store, CAPACITY_BYTES) as opened:
        assert opened.statistics().num_records == 0


def test_a_tree_that_lmdb_finds_broken_is_said_to_be_damaged(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    with (store / "data.mdb").open("r+b") as file:
        file.seek(8192)
        file.write(bytes((store / "data.mdb").stat().st_size - 8192))

    status, out, err = run(capsys, "check", store)

    assert (status, out) == (1, "")
    assert "is damaged: " in err
    assert "with --fix the next engine that opens it starts empty" in err
    assert len(err.splitlines()) == 1


def test_a_row_of_the_index_that_makes_no_sense_is_damage(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    with changed_index(store) as (txn, tables):
        txn.put(key_of(3, B), b"short", db=tables.records)

    for command, meaning in (("stats", "kvtier check says"), ("check", "the next engine that opens it starts empty")):
        status, out, err = run(capsys, command, store)
        assert (status, out) == (1, "")
        assert "is damaged" in err
        assert meaning in err
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", [["check"], ["store", "rm", "--all", "--yes"]])
def test_a_broken_index_is_said_to_be_damaged_and_nothing_is_deleted(
    capsys: pytest.CaptureFixture[str], store: Path, command: list[str]
) -> None:
    data = bytearray((store / "data.mdb").read_bytes())
    place = -1
    while (place := data.find(b"\x02\0\x05\0order", place + 1)) >= 0:  # it is a sub-database no more
        data[place] = 0
    (store / "data.mdb").write_bytes(data)
    files = [store / name for name in ("data.mdb", "slab-8192", "boot_mark")]
    before = [path.read_bytes() for path in files]

    status, out, err = run(capsys, *command, store)

    assert (status, out) == (1, "")
    assert "is damaged: " in err
    assert len(err.splitlines()) == 1
    assert [path.read_bytes() for path in files] == before

    assert run(capsys, "check", store, "--fix")[0] == 1
    assert BootMark.read(store) == BootMark(current_boot_id(), FileState.DAMAGED)


@pytest.mark.parametrize("command", [["check"], ["stats"], ["store", "ls"], ["store", "rm", "--all"]])
def test_a_file_that_is_no_folder_is_no_store(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "file").touch()

    status, out, err = run(capsys, *command, tmp_path / "file")

    assert (status, out) == (2, "")
    assert f"no store in {tmp_path / 'file'}; give" in err


def find_unreadable(*_: object) -> Iterator[Verification]:
    """Stands for `verify_store` on a medium that fails."""
    yield Verification(2, {A: Tally(2, 4096, Counter({Fault.IO_ERROR: 1}))}, "", False, 0, 0.1)


def test_check_says_that_a_record_could_not_be_read(
    capsys: pytest.CaptureFixture[str], store: Path, monkeypatch: pytest.MonkeyPatch, for_children: None
) -> None:
    monkeypatch.setattr(upkeep, "verify_store", find_unreadable)

    status, out, err = run(capsys, "check", store)

    assert (status, err) == (1, "")
    assert "1 records could not be read" in out
    assert rows_of(out)["namespace"][-1] == "io_error"


@pytest.mark.long
def test_check_shows_its_progress_on_a_terminal(many: Path) -> None:
    ours, theirs = pty.openpty()
    with start("check", many, stderr=theirs) as check:
        os.close(theirs)
        shown = b""
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            try:
                while read := terminal.read(4096):
                    shown += read
            except OSError:  # the other end is closed
                pass
        out, _ = check.communicate(timeout=PATIENCE_S)

    assert check.returncode == 0
    assert f"{NUM_MANY:,} records verified" in out
    assert "counting" in shown.decode()
    assert re.search(
        rf"verifying .* of {NUM_MANY * charged_bytes(MANY_BLOCK_BYTES) / (1 << 20):.1f} MiB, .*B/s", shown.decode()
    )


@pytest.mark.long
def test_ctrl_c_ends_a_check_and_leaves_the_store_closed(many: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(many, tmp_path / "store"))
    for _ in range(60):
        with start("check", store) as check:
            wait_until_open(store, check)
            with suppress(ProcessLookupError):
                os.killpg(check.pid, signal.SIGINT)
            out, err = check.communicate(timeout=PATIENCE_S)
        if check.returncode != 0:  # else it was done before
            break

    assert (check.returncode, out, err) == (130, "", "kvtier: stopped\n")
    assert BootMark.read(store) == BootMark(current_boot_id(), FileState.CLEAN)
    assert len(content_of(store)) == NUM_MANY


@pytest.mark.long
def test_a_killed_check_lets_go_of_the_store(many: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(many, tmp_path / "store"))
    with start("check", store) as check:
        wait_until_open(store, check)
        check.kill()

    assert len(content_of(store)) == NUM_MANY  # opening waits a while for it


def test_nobody_reading_the_output_is_no_error_and_the_work_is_done(store: Path) -> None:
    damage(store, Fault.TORN, key_of(3, B))
    with start("check", store, "--fix") as check:
        assert check.stdout is not None
        check.stdout.close()
        assert check.stderr is not None
        err = check.stderr.read()

    assert (check.returncode, err) == (128 + signal.SIGPIPE, "")
    assert len(content_of(store)) == 19


# stats and store ls


def test_stats_shows_totals_and_namespaces(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    status, out, err = run(capsys, "stats", store)

    assert (status, err) == (0, "")
    assert re.search(r"state +clean", out)
    assert re.search(r"records +20\b", out)
    assert re.search(rf"stored +{20 * CHARGED_KIB:.1f} KiB of 10\.0 MiB \(\d%\)", out)
    assert re.search(r"written +160\.0 KiB in total", out)
    assert rows_of(out)[A.hex()] == ["12", f"{12 * CHARGED_KIB:.1f}", "KiB", "60%"]
    assert run(capsys, "store", "ls", store)[1].strip() in out


def test_stats_as_json_is_one_object(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    told = json_of(capsys, "stats", store)

    each = charged_bytes(BLOCK_BYTES)
    assert (told["records"], told["stored_bytes"], told["capacity_bytes"]) == (20, 20 * each, CAPACITY_BYTES)
    assert (told["written_bytes_total"], told["evicted_total"]) == (20 * BLOCK_BYTES, 0)
    assert told["file_bytes"] == sum(file.stat().st_blocks for file in store.iterdir()) * 512
    assert (told["state"], told["next_start"], told["owner_pid"]) == ("clean", "warm", None)
    counts = {C: 1, A: 12, B: 7}
    assert told["namespaces"] == [
        {"namespace": namespace.hex(), "records": count, "stored_bytes": count * each}
        for namespace, count in counts.items()
    ]


def test_stats_works_while_another_process_has_the_store(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    with owner_of(store) as owner:
        status, out, err = run(capsys, "stats", store)
        told = json_of(capsys, "stats", store)

    assert (status, err) == (0, "")
    assert f"open in process {owner.pid}" in out
    assert (told["state"], told["owner_pid"], told["durability"]) == ("open", owner.pid, "process")
    assert told["records"] == 20
    assert owner.returncode == 0


def test_stats_says_that_the_owner_was_killed(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    with owner_of(store) as owner:
        owner.kill()

    told = json_of(capsys, "stats", store)

    assert (told["state"], told["next_start"], told["records"]) == ("left open", "warm", 20)
    assert run(capsys, "check", store)[0] == 0
    assert json_of(capsys, "stats", store)["state"] == "clean"


def test_stats_says_what_a_crash_of_the_machine_left(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    BootMark("earlier-boot", FileState.PROCESS).write(store)

    status, out, _ = run(capsys, "stats", store)
    told = json_of(capsys, "stats", store)

    assert status == 1
    assert "the machine went down while it was open; the next engine that opens it starts empty" in out
    assert (told["state"], told["next_start"], told.get("records")) == ("machine went down", "empty", None)


def test_what_reads_stores_needs_neither_torch_nor_transformers(store: Path) -> None:
    script = f"""
import sys
from kvtier.cli.subprocess_call import call_in_process
from kvtier.cli.main import main
assert main(["check", {str(store)!r}]) == main(["stats", {str(store)!r}]) == 0
there = call_in_process(eval, "set(__import__('sys').modules)")
print(sorted({{"torch", "transformers"}} & (there | set(sys.modules))))
"""

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    assert done.stdout.splitlines()[-1] == "[]"


# store rm


def num_left(folder: Path) -> dict[bytes, int]:
    return dict(Counter(key[:16] for key in content_of(folder)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--namespace", A.hex()], {B: 7, C: 1}),
        (["--namespace", A.hex()[:20]], {B: 7, C: 1}),
        (["--namespace", C.hex()[:1].upper() + C.hex()[1:5].upper(), "--namespace", B.hex()], {A: 12}),
        (["--all-but", A.hex()], {A: 12}),
        (["--all-but", A.hex(), "--all-but", C.hex()], {A: 12, C: 1}),
        (["--all"], {}),
    ],
)
def test_rm_deletes_what_was_named_and_nothing_else(
    capsys: pytest.CaptureFixture[str], store: Path, options: list[str], left: dict[bytes, int]
) -> None:
    num_gone = 20 - sum(left.values())

    status, out, err = run(capsys, "store", "rm", store, *options, "--yes")

    assert (status, err) == (0, "")
    assert f"{num_gone} records deleted, {num_gone * CHARGED_KIB:.1f} KiB" in out
    assert num_left(store) == left


def test_nobody_finds_in_a_slab_what_was_deleted(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    before = (store / "slab-8192").stat().st_blocks

    assert run(capsys, "store", "rm", store, "--namespace", A.hex(), "--yes")[0] == 0

    assert (store / "slab-8192").stat().st_blocks * 512 <= before * 512 - 12 * BLOCK_BYTES
    found = [bytes(blob_of(n, A).raw) in (store / "slab-8192").read_bytes() for n in range(12)]
    assert [n for n in range(12) if found[n]] == list(range(7))  # B has the same payloads


@pytest.mark.long
def test_rm_of_many_records_deletes_them_all(capsys: pytest.CaptureFixture[str], many: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(many, tmp_path / "store"))

    status, out, _ = run(capsys, "store", "rm", store, "--namespace", A.hex(), "--yes")

    assert status == 0
    assert "10,000 records deleted" in out
    assert num_left(store) == {B: NUM_MANY // 2}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--namespace", A.hex()[:4]], B.hex()),  # begins with it too
        (["--namespace", ""], "''"),
        (["--namespace", "ffff"], "kvtier store ls"),
        (["--namespace", "the model"], "'the model'"),
        (["--all-but", "ffff"], "'ffff'"),
        (["--all", "--all-but", "ff"], "not allowed"),
        ([], "--all-but"),
    ],
)
def test_rm_of_a_namespace_that_is_not_clear_is_one_line_and_deletes_nothing(
    capsys: pytest.CaptureFixture[str], store: Path, options: list[str], named: str
) -> None:
    status, out, err = run(capsys, "store", "rm", store, *options, "--yes")

    assert (status, out) == (2, "")
    assert named in err
    assert len(err.splitlines()) == 1
    assert num_left(store) == {A: 12, B: 7, C: 1}


def test_rm_without_a_terminal_wants_yes(store: Path) -> None:
    with start("store", "rm", store, "--all") as rm:
        out, err = rm.communicate(timeout=PATIENCE_S)

    assert (rm.returncode, out) == (2, "")
    assert "add --yes" in err
    assert num_left(store) == {A: 12, B: 7, C: 1}


@pytest.mark.long
@pytest.mark.parametrize(("answer", "left"), [("y\n", {A: 12, C: 1}), ("n\n", None), ("\n", None), ("\x04", None)])
def test_rm_on_a_terminal_asks(store: Path, answer: str, left: dict[bytes, int] | None) -> None:
    ours, theirs = pty.openpty()
    with start("store", "rm", store, "--namespace", B.hex(), stdin=theirs) as rm:
        os.close(theirs)
        os.write(ours, answer.encode())
        out, err = rm.communicate(timeout=PATIENCE_S)
    os.close(ours)

    assert f"delete 7 records, {7 * CHARGED_KIB:.1f} KiB, of" in err
    assert rm.returncode == (2 if left is None else 0)
    assert ("7 records deleted" in out) == (left is not None)
    assert num_left(store) == (left or {A: 12, B: 7, C: 1})


def test_rm_of_a_store_in_use_names_the_process_and_deletes_nothing(
    capsys: pytest.CaptureFixture[str], store: Path
) -> None:
    with owner_of(store) as owner:
        status, out, err = run(capsys, "store", "rm", store, "--all", "--yes")

    assert (status, out) == (2, "")
    assert f"open in process {owner.pid};" in err
    assert num_left(store) == {A: 12, B: 7, C: 1}


def test_rm_in_an_empty_store_has_nothing_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fill(tmp_path, {})

    status, out, err = run(capsys, "store", "rm", tmp_path, "--all")

    assert (status, err) == (0, "")
    assert "nothing to delete" in out


# what runs apart


def count_up(how_many: int, folder: str) -> Iterator[int]:
    """Leaves a file in *folder* when it is closed."""
    try:
        yield from range(how_many)
    finally:
        (Path(folder) / "closed").touch()


def crash(signal_number: int) -> None:
    os.kill(os.getpid(), signal_number)


def test_what_runs_apart_gives_its_items_its_result_and_its_errors(tmp_path: Path, for_children: None) -> None:

    with iterate_in_process(count_up, 5, str(tmp_path)) as items:
        assert list(items) == list(range(5))

    assert call_in_process(sorted, [3, 1, 2]) == [1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        call_in_process(divmod, 1, 0)


def test_what_runs_apart_is_closed_when_nobody_listens_any_more(tmp_path: Path, for_children: None) -> None:

    with iterate_in_process(count_up, 1 << 62, str(tmp_path)) as items:
        assert next(items) == 0
        assert not (tmp_path / "closed").exists()

    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGABRT", "SIGKILL"])
def test_a_crash_of_what_runs_apart_is_an_error_that_names_the_signal(name: str, for_children: None) -> None:

    with pytest.raises(Crashed, match=name) as crashed:
        call_in_process(crash, signal.Signals[name])

    assert crashed.value.signal_name == name


def test_one_that_ends_apart_without_a_word_is_an_error_that_has_its_last_words() -> None:
    with pytest.raises(Crashed, match="there is no such thing") as crashed:
        call_in_process(exec, "import sys; sys.exit('there is no such thing')")

    assert crashed.value.signal_name == ""


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (2 << 50, "2,048.0 TiB"),
    ],
)
def test_sizes_are_for_people(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
