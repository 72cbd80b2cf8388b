"""LMCache's objects as rows on disk, without LMCache."""

import ctypes
import os
import select
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvtier.connectors.disk_below.open import open_disk_below
from kvtier.connectors.lmcache_l2.object_names import (
    ABSTRACT,
    KnownLayouts,
    UnsupportedEngine,
    check_lmcache,
    layout_of,
    name_of,
    namespace_of,
)
from kvtier.connectors.lmcache_l2.objects_on_disk import ObjectsOnDisk, Outcomes, settings_of

FAR_S = 60.0


@dataclass(frozen=True)
class Key:
    chunk_hash: bytes
    model_name: str = "m"
    kv_rank: int = 1
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class Half:
    """A number type, as torch's are."""

    name: str = "float16"
    itemsize: int = 2


@dataclass(frozen=True)
class Tensors:
    shapes: list[tuple[int, ...]] | None
    dtypes: list[Half] | None

    @property
    def shape(self) -> tuple[int, ...]:
        assert self.shapes is not None
        return self.shapes[0]

    @property
    def dtype(self) -> Half:
        assert self.dtypes is not None
        return self.dtypes[0]


class Memory:
    """An object's memory, of C's unsigned chars as LMCache's is."""

    def __init__(self, content: bytes) -> None:
        self.metadata = Tensors([(len(content) // 2,)], [Half()])
        self._chars = (ctypes.c_ubyte * len(content)).from_buffer_copy(content)

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self._chars)


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[ObjectsOnDisk]:
    settings = settings_of({"path": str(tmp_path / "store"), "capacity": "64MiB"})
    disk = open_disk_below(settings, namespace_of("1", None), lambda num_bytes: num_bytes)
    assert disk.wait_indexed(FAR_S)
    yield ObjectsOnDisk(disk)
    disk.close()


def keys(num: int) -> list[Key]:
    return [Key(bytes([number]) * 32) for number in range(num)]


def test_objects_of_several_sizes_are_found_and_loaded(objects: ObjectsOnDisk) -> None:
    contents = [bytes([number]) * 2 * (1000 + number % 2) for number in range(6)]
    assert objects.store(keys(6), [Memory(content) for content in contents]).result(FAR_S) == [True] * 6

    loaded = [Memory(bytes(len(content))) for content in contents]
    assert objects.load(keys(6), loaded).result(FAR_S) == [True] * 6
    assert [bytes(memory.byte_array) for memory in loaded] == contents

    said = {0: Tensors([(1000,)], [Half()])}
    assert [row is not None for row in objects.find(keys(7)[::2], said)] == [True, True, True, False]


def test_an_object_is_never_read_into_memory_of_another_size_and_stays(objects: ObjectsOnDisk) -> None:
    (key,) = keys(1)
    objects.store([key], [Memory(b"ab" * 1000)]).result(FAR_S)

    assert objects.load([key], [Memory(bytes(4000))]).result(FAR_S) == [False]
    assert objects.load([key], [Memory(bytes(2000))]).result(FAR_S) == [True]


@pytest.mark.parametrize("field", ["chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"])
def test_every_field_of_a_key_is_in_the_name(field: str) -> None:
    others = {"chunk_hash": b"y", "model_name": "n", "kv_rank": 2, "object_group_id": 1, "cache_salt": "s"}
    key, layout = Key(b"x"), layout_of(((8,),), (Half(),), 16)

    assert name_of(replace(key, **{field: others[field]}), layout) != name_of(key, layout)


def test_no_part_of_a_key_can_be_taken_for_the_next_one() -> None:
    layout = layout_of(((8,),), (Half(),), 16)

    assert name_of(Key(b"x", "mo", cache_salt="del"), layout) != name_of(Key(b"x", "mode", cache_salt="l"), layout)


def test_layouts_that_are_as_long_have_other_names() -> None:
    key = Key(b"x")
    layouts = [
        layout_of(((2, 8),), (Half(),), 32),
        layout_of(((8, 2),), (Half(),), 32),
        layout_of(((2, 8),), (Half("bfloat16"),), 32),
        layout_of(((8,), (8,)), (Half(), Half()), 32),
    ]

    assert len({name_of(key, layout) for layout in layouts}) == 4


def test_the_layout_last_seen_is_that_of_the_model_the_rank_and_the_group() -> None:
    known = KnownLayouts()
    of_one, of_other = (layout_of((shape,), ("torch.float32",), 64) for shape in ((16,), (4, 4)))
    others = [Key(b"", model_name="other"), Key(b"", kv_rank=7), Key(b"", object_group_id=3)]

    known.learn(Key(b"one"), of_one)
    assert [known.of(other) for other in others] == [None] * 3
    for other in others:
        known.learn(other, of_other)

    assert known.of(Key(b"two", cache_salt="salt")) == of_one
    assert [known.of(other) for other in others] == [of_other] * 3


def test_the_namespace_is_another_one_for_other_weights_and_another_lmcache() -> None:
    meant = [("0.5.6", None), ("0.5.6", "a"), ("0.5.6", "b"), ("0.5.7", "a")]
    assert len({namespace_of(lmcache, weights) for lmcache, weights in meant}) == len(meant)


def test_an_outcome_is_given_once_and_its_eventfd_is_readable_until_then() -> None:
    outcomes: Outcomes[str] = Outcomes()
    poller = select.poll()
    poller.register(outcomes.event_fd, select.POLLIN)
    assert not poller.poll(0)

    outcomes.put(7, "done")
    outcomes.put(8, "too")

    assert poller.poll(0)
    os.eventfd_read(outcomes.event_fd)
    assert outcomes.pop(7) == "done"
    assert outcomes.pop(7) is None
    assert outcomes.pop_all() == {8: "too"}
    outcomes.close()
    outcomes.put(9, "late")
    assert outcomes.pop(9) is None


def adapter_class(*more: str) -> type:
    """LMCache's class of adapters, as far as it is looked at."""
    return type("Adapter", (ABC,), {method: abstractmethod(lambda self: None) for method in (*ABSTRACT, *more)})


@dataclass(frozen=True)
class KeyWithAdapter(Key):
    lora: str = ""


class LmcacheMemory:
    byte_array = metadata = get_size = None


def test_an_lmcache_whose_keys_tell_more_apart_is_refused() -> None:
    check_lmcache(adapter_class(), Key, LmcacheMemory)

    with pytest.raises(UnsupportedEngine, match=r"classes differ in lora.*install lmcache 0\.5\.6"):
        check_lmcache(adapter_class(), KeyWithAdapter, LmcacheMemory)


def test_an_lmcache_that_asks_more_of_an_adapter_is_refused() -> None:
    with pytest.raises(UnsupportedEngine, match="submit_rename_task"):
        check_lmcache(adapter_class("submit_rename_task"), Key, LmcacheMemory)


def test_an_lmcache_that_asks_where_bytes_are_is_served() -> None:
    check_lmcache(adapter_class("get_memory_tags"), Key, LmcacheMemory)


def test_an_lmcache_whose_memory_is_another_is_refused() -> None:
    with pytest.raises(UnsupportedEngine, match="byte_array"):
        check_lmcache(adapter_class(), Key, object)
