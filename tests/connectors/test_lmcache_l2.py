"""The L2 adapter as LMCache makes and uses it, by LMCache's own classes, in an interpreter of their own."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from foreign.lmcache_server import OUR_L2, our_l2
from foreign.told_script import ToldScript, clients_of_lmcache
from waiting import wait_for

PYTHON = os.environ.get("KVTIER_LMCACHE_PYTHON", "")
OBJECT_BYTES = 256 << 10  # in the script
CAPACITY = "64MiB"
UNVERIFIED = Path(__file__).parents[1] / "support" / "unverified"

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason="KVTIER_LMCACHE_PYTHON names no interpreter with lmcache"),
]


@pytest.fixture(scope="module", params=["0.5.6", "0.5.7rc2"])
def before(request: pytest.FixtureRequest) -> Sequence[Path]:
    """Folders that are searched first, for each version of LMCache."""
    return clients_of_lmcache(PYTHON)[request.param]


@pytest.fixture(params=["shared", "private"])
def l2(request: pytest.FixtureRequest, before: Sequence[Path]) -> Iterator[ToldScript]:
    with ToldScript(PYTHON, "lmcache_l2.py", request.param, knows_kvtier=True, before=before) as script:
        yield script
        script.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def shared(before: Sequence[Path]) -> Iterator[ToldScript]:
    """One interpreter for several tests: its start takes seconds."""
    with ToldScript(PYTHON, "lmcache_l2.py", "shared", knows_kvtier=True, before=before) as script:
        yield script
        script.process.communicate(timeout=60)


@pytest.fixture
def adapter(shared: ToldScript, tmp_path: Path) -> Iterator[ToldScript]:
    assert shared.make(our_l2(tmp_path / "store", CAPACITY)) == "KVTierL2"
    yield shared
    shared.close()


def change(store: Path, changed: Callable[[bytes], bytes]) -> None:
    """Change the payloads on disk, of a store that is closed."""
    for slab in store.glob("slab-*"):
        slab.write_bytes(changed(slab.read_bytes()))


def flipped(data: bytes) -> bytes:
    return data[:1000] + bytes([data[1000] ^ 64]) + data[1001:]


def test_it_says_where_bytes_are_and_takes_what_was_used(adapter: ToldScript) -> None:
    adapter.store(0, 4)

    adapter.touch(2, 4)  # two of them are there

    assert adapter.status()["errors_total"] == 0
    assert adapter.tags() in (None, ["storage", "local"])  # lmcache 0.5.6 does not ask


def test_what_is_stored_is_found_and_loaded_also_after_it_was_opened_again(l2: ToldScript, tmp_path: Path) -> None:
    spec = our_l2(tmp_path / "store", CAPACITY)
    l2.make(spec)

    assert len(set(l2.event_fds())) == 3
    assert l2.store(0, 8) == [True, 8 * OBJECT_BYTES]
    assert l2.find(4, 8) == [4, 5, 6, 7]
    assert l2.load(4, 8) == [[4, 5, 6, 7], []]
    l2.close()
    l2.make(spec)
    assert l2.find(0, 12) == list(range(8))
    assert l2.load(0, 8) == [list(range(8)), []]
    l2.close()


def test_a_look_up_that_says_no_layout_means_the_one_last_seen(adapter: ToldScript) -> None:
    assert adapter.find(0, 2, None, None) == []
    adapter.store(0, 2)

    assert adapter.find(0, 4, None, None) == [0, 1]


@pytest.mark.parametrize(
    "other",
    [{"model_name": "n"}, {"kv_rank": 0x02000200}, {"object_group_id": 1}, {"cache_salt": "ann"}],
    ids=["model", "rank", "group", "salt"],
)
def test_objects_that_differ_in_one_field_of_their_key_are_two(adapter: ToldScript, other: dict[str, object]) -> None:
    adapter.store(0, 2)

    assert adapter.find(0, 2, other) == []
    assert adapter.load(0, 2, other) == [[], []]
    assert adapter.store(0, 2, other)[0] is True
    assert adapter.find(0, 2, other) == adapter.find(0, 2) == [0, 1]


def test_objects_of_another_type_are_not_found_although_they_are_as_long(adapter: ToldScript) -> None:
    adapter.store(0, 2, None, "float16")

    assert adapter.find(2, 1, None, "bfloat16") == []
    assert adapter.load(0, 2, None, "bfloat16") == [[], []]
    assert adapter.find(0, 2, None, "float16") == [0, 1]


def test_other_weights_find_nothing_and_the_same_ones_do(shared: ToldScript, tmp_path: Path) -> None:
    seen = []
    for weights in ("a", "b", "a"):
        shared.make(our_l2(tmp_path / "store", CAPACITY, weights=weights))
        seen.append(shared.find(0, 2))
        shared.store(0, 2)
        shared.close()

    assert seen == [[], [], [0, 1]]


@pytest.mark.parametrize(
    "changed",
    [flipped, lambda data: data[: OBJECT_BYTES // 2]],
    ids=["a flipped byte", "a truncated file"],
)
def test_damage_is_a_load_that_fails_and_never_other_bytes(
    shared: ToldScript, tmp_path: Path, changed: Callable[[bytes], bytes]
) -> None:
    spec = our_l2(tmp_path / "store", CAPACITY)
    shared.make(spec)
    shared.store(0, 8)
    shared.close()
    change(tmp_path / "store", changed)

    shared.make(spec)
    promised = shared.find(0, 8)
    loaded, wrong = shared.load(0, 8)

    assert promised == list(range(8))
    assert wrong == []
    assert len(loaded) < 8
    assert sum(shared.status()["corrupt_total"].values()) == 8 - len(loaded)
    assert shared.find(0, 8) == loaded  # what has failed is not promised again
    assert shared.store(0, 8)[0] is True
    assert shared.load(0, 8) == [list(range(8)), []]
    shared.close()


def test_a_store_that_verifies_nothing_gives_wrong_bytes_for_a_flipped_one(tmp_path: Path) -> None:
    """The negative control: that nothing is wrong elsewhere means that loads are verified."""
    spec = our_l2(tmp_path / "store", CAPACITY)
    with ToldScript(PYTHON, "lmcache_l2.py", "shared", knows_kvtier=True, before=[UNVERIFIED]) as unchecked:
        unchecked.make(spec)
        unchecked.store(0, 8)
        unchecked.close()
        change(tmp_path / "store", flipped)
        unchecked.make(spec)

        loaded, wrong = unchecked.load(0, 8)
        unchecked.process.communicate(timeout=60)

    assert loaded == list(range(8))
    assert len(wrong) == 1


def test_the_store_never_has_more_than_its_capacity_and_what_it_has_is_right(
    adapter: ToldScript, tmp_path: Path
) -> None:
    for first in range(0, 1024, 32):  # four times as much as it holds
        adapter.store(first, 32)

    on_disk = sum(path.stat().st_blocks * 512 for path in (tmp_path / "store").iterdir())
    loaded, wrong = adapter.load(992, 32)
    used, capacity, does_lmcache_evict = adapter.usage()

    assert on_disk <= 64 << 20
    assert (loaded, wrong) == (list(range(992, 1024)), [])
    assert 0 < used <= capacity <= 64 << 20
    assert does_lmcache_evict is False
    assert adapter.find(0, 1) == []


def test_a_store_whose_process_is_killed_costs_hits_and_comes_again(adapter: ToldScript, tmp_path: Path) -> None:
    adapter.store(0, 4)
    os.kill(store_process(tmp_path / "store"), signal.SIGKILL)

    assert adapter.load(0, 4)[1] == []
    wait_for(lambda: adapter.store(0, 4)[0] is True and adapter.load(0, 4) == [[0, 1, 2, 3], []])
    assert adapter.status()["errors_total"] == 0


def test_a_folder_that_cannot_be_used_is_a_disk_with_nothing(shared: ToldScript, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    shared.make(our_l2(tmp_path / "store", CAPACITY))

    assert shared.store(0, 2) == [False, 0]
    assert shared.find(0, 2) == []
    assert shared.load(0, 2) == [[], []]
    assert shared.status()["is_healthy"] is False
    shared.close()


@pytest.mark.parametrize(
    ("params", "said"),
    [({"path": "x", "capacty": "1GiB"}, "capacity"), ({}, "path"), ({"path": "x", "codec": "fp8"}, "fp8")],
    ids=["a misspelt key", "no path", "a codec that changes bytes"],
)
def test_what_the_adapter_cannot_be_configured_with_is_said_at_the_start(
    shared: ToldScript, params: dict[str, object], said: str
) -> None:
    answer = shared.make(json.dumps({**OUR_L2, "adapter_params": params}))

    assert answer.startswith("ValueError: ")
    assert said in answer


def store_process(folder: Path) -> int:
    """The process that has the store open."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_store = b"store_server" in (process / "cmdline").read_bytes()
            if is_store and any(os.readlink(file).startswith(str(folder)) for file in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue
    raise AssertionError("no process has the store open")
