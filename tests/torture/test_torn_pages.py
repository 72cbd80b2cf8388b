"""Pages of a closed store's files torn, lost, swapped or rotten give right bytes, misses, errors or an empty store.

LMDB trusts its tree, so a broken one may crash the process: that is counted and said with its seed, and `StoreProcess`
is for it. Wrong bytes, hangs and other exceptions than OSError are failures.
"""

import os
import random
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from forks import Ended, ForkServer, HangError, describe
from lmdb_pages import PAGE_BYTES, map_pages
from torture_blocks import KINDS, blob_of, chain, key_of, numbers_in, open_store

from kvtier.store.durability import Durability
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.record import Fault

CAPACITY_BYTES = 1 << 20
NUM_CHAINS = 60
HANGS_AFTER_S = 120.0  # a call that normally takes a second
BAD = {f"read: {fault}" for fault in Fault if fault.is_bad_record}


Page = tuple[str, int]  # the file, and the offset in it


@dataclass(frozen=True)
class Template:
    """A closed store: its files at the end and some time before, its pages by kind, and its blocks."""

    folder: Path
    files: dict[str, bytes]
    older: dict[str, bytes]
    pages: dict[str, list[Page]]
    numbers: list[int]

    def copy_to(self, folder: Path, files: dict[str, bytearray]) -> None:
        """Another such store with these *files*."""
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns(*files, "lock.mdb"))
        for name, data in files.items():
            with (folder / name).open("wb") as file:
                file.truncate((self.folder / name).stat().st_size)
                for start in range(0, len(data), PAGE_BYTES):
                    if any(page := data[start : start + PAGE_BYTES]):  # holes stay holes
                        file.seek(start)
                        file.write(page)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    folder = tmp_path_factory.mktemp("template") / "store"
    versions = []
    for first in (0, NUM_CHAINS):
        with open_store(folder, CAPACITY_BYTES, "none", Durability.PROCESS) as store:
            for chain_id in range(first, first + NUM_CHAINS):
                store.put_many([blob_of(number) for number in chain(KINDS[chain_id % 4], chain_id)[::-1]])
            numbers = numbers_in(store)
            payload = pages_of_payloads(store, numbers)
        versions.append({path.name: path.read_bytes() for path in [folder / "data.mdb", *folder.glob("slab-*")]})
    older, files = versions
    index = map_pages(files["data.mdb"])
    files["data.mdb"] = files["data.mdb"][: index.num_pages * PAGE_BYTES]
    pages = {
        "payload": payload,
        "index": [("data.mdb", page) for page in index.index],
        "root": [("data.mdb", page) for page in index.meta],
        "any": [(name, page) for name, data in files.items() for page in range(len(data) // PAGE_BYTES)],
    }
    return Template(folder, files, older, pages, numbers)


def pages_of_payloads(store: LmdbStore, numbers: list[int]) -> list[Page]:
    """The pages of the slots of *numbers*."""
    pages = []
    with store.files.tables.env.begin() as txn:
        for number in numbers:
            located = store.files.tables.located(txn, key_of(number))
            assert located is not None
            slot, num_pages = located[1], located[1].num_bytes // PAGE_BYTES
            first = slot.number * num_pages
            pages += [(f"slab-{slot.num_bytes}", page) for page in range(first, first + num_pages)]
    return pages


def tear(data: bytearray, older: bytes, page: int, rng: random.Random) -> str:
    """Damage *page* as disks and drivers do; returns what was done."""
    start, end = page * PAGE_BYTES, (page + 1) * PAGE_BYTES
    first = start + rng.randrange(PAGE_BYTES - 512)
    last = rng.randint(first + 512, end)
    way = rng.choice(["noise", "zeros", "bit", "lost write", "other page"])
    if way == "noise":
        data[first:last] = rng.randbytes(last - first)
    elif way == "zeros":
        data[first:last] = bytes(last - first)
    elif way == "bit":
        data[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
    elif way == "lost write":
        data[start:end] = older[start:end].ljust(PAGE_BYTES, b"\0")
    else:
        other = rng.randrange(len(data) // PAGE_BYTES) * PAGE_BYTES
        data[start:end] = data[other : other + PAGE_BYTES]
    return f"{way} in page {page}"


def tear_some(template: Template, folder: Path, what: str, rng: random.Random) -> list[str]:
    """Make a copy of the template with 1 to 4 torn pages of a kind; returns what was done to them."""
    files = {name: bytearray(data) for name, data in template.files.items()}
    done = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        name, page = rng.choice(template.pages[what])
        done.append(f"{name}: {tear(files[name], template.older.get(name, b''), page, rng)}")
    template.copy_to(folder, files)
    return done


def tear_many(forks: ForkServer, template: Template, folder: Path, what: str, seed: int, num_cases: int) -> None:
    """Use many stores with torn pages of a kind, and print their outcomes."""
    outcomes, crashes, hangs, strange = Counter[str](), list[str](), list[str](), list[str]()
    only = os.environ.get("TORTURE_CASE")
    for case_id in range(num_cases) if only is None else [int(only)]:
        if case_id and case_id % 50 == 0:
            print(f"{what}: {case_id} cases, {len(crashes)} crashes, {len(hangs)} hangs", flush=True)
        torn, errors = folder / str(case_id), folder / "errors"
        rng = random.Random(f"{seed} {what} {case_id}")
        durability = rng.choice(list(Durability))
        done = tear_some(template, torn, what, rng)
        context = f"TORTURE_SEED={seed} TORTURE_CASE={case_id} {what}, {durability}: {', '.join(done)}"
        child = forks.start(
            "torn_store",
            stderr=str(errors),
            folder=str(torn),
            capacity_bytes=CAPACITY_BYTES,
            durability=durability,
            numbers=template.numbers,
            first_chain=10 * NUM_CHAINS,
        )
        try:
            ended = child.wait(HANGS_AFTER_S)
        except HangError:
            hangs.append(f"{_where(errors)} {context}")
            continue
        finally:
            shutil.rmtree(torn)
        assert ended.of("error") == [], f"{context}: {ended.of('error')[0]}"
        if ended.status:
            crashes.append(f"{describe(ended.status)} {_where(errors)} {context}")
            continue
        exceptions = {exception for look in ended.of("strange") for exception in look}
        strange += [f"{exception} {context}" for exception in sorted(exceptions)]
        outcomes["empty at once"] += bool(ended.of("emptied")[0])
        outcomes["empty the second time"] += bool(ended.of("emptied")[1])
        outcomes["errors"] += any("raises" in outcome for counts in ended.of("counts") for outcome in counts)
        outcomes["bad records"] += any(outcome in BAD for outcome in ended.of("counts")[0])
        if what == "payload":
            _assert_only_the_torn_are_missing(ended, template, context)
    print(f"{what}: {num_cases} cases, {dict(outcomes)}", f"{len(crashes)} crashes", *crashes, sep="\n    ", flush=True)
    assert (hangs, strange) == ([], []), "\n".join(["not OSError, or no end:", *hangs, *strange])
    if what == "payload":
        assert crashes == []
        assert outcomes["bad records"] > 0  # else no page was torn


def _where(errors: Path) -> str:
    """The messages of `faulthandler` and LMDB about a crash, in one line."""
    text = errors.read_text()
    assertion = [line.partition("Assertion ")[2] for line in text.splitlines() if "Assertion" in line]
    _, _, current = text.partition("Current thread")
    frames = re.findall(r'File ".*/(\w+\.py)", line (\d+) in (\w+)', current)
    ours = [f"{file}:{line} {name}" for file, line, name in frames if file.startswith(("lmdb_", "data_file"))]
    return f"({'; '.join(assertion + ours[:2])})"


def _assert_only_the_torn_are_missing(ended: Ended, template: Template, context: str) -> None:
    counts = ended.of("counts")[0]
    assert ended.of("emptied") == ["", ""], context
    assert len(template.numbers) - 4 <= counts["verify: right"] <= len(template.numbers), f"{context}: {counts}"
    assert not any(outcome.startswith(("check", "other keys")) and n for outcome, n in counts.items()), (
        f"{context}: {counts}"
    )


@pytest.mark.long
@pytest.mark.parametrize("what", ["payload", "index", "root", "any"])
def test_torn_pages_give_right_bytes_or_none(
    forks: ForkServer, template: Template, tmp_path: Path, what: str, seed: int
) -> None:
    tear_many(forks, template, tmp_path, what, seed, num_cases=6)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["payload", "index", "root", "any"])
def test_hundreds_of_torn_pages_give_right_bytes_or_none(
    forks: ForkServer, template: Template, tmp_path: Path, what: str, seed: int
) -> None:
    tear_many(forks, template, tmp_path, what, seed, num_cases=int(os.environ.get("TORTURE_TEARS") or 200))
