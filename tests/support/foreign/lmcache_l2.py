"""An L2 adapter that LMCache makes, told what to do line by line: `python lmcache_l2.py MEMORY`.

A line is a JSON list, a function's name and its arguments. The answer is a line that begins with `answer`. MEMORY is
`shared`, as LMCache's server has it, or `private`. Objects are numbered: each number has bytes of its own.
"""

import argparse
import json
import os
import select
import sys
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryObj, MemoryObjMetadata, TensorMemoryObj, _allocate_cpu_memory
from lmcache.v1.platform import consume_fd

OBJECT_BYTES = 256 << 10
MAX_OBJECTS = 64  # of one call
TIMEOUT_MS = 60_000

adapter: L2AdapterInterface
shm_name = f"lmcache_told_{os.getpid()}" if sys.argv[1] == "shared" else None
memory = (
    _allocate_cpu_memory(OBJECT_BYTES * MAX_OBJECTS, shm_name=shm_name)
    if shm_name
    else torch.empty(OBJECT_BYTES * MAX_OBJECTS, dtype=torch.uint8)
)


def layout(dtype: str) -> tuple[list[torch.Size], list[torch.dtype]]:
    """Of an object of two tensors, of OBJECT_BYTES in all."""
    element = getattr(torch, dtype)
    return [torch.Size([2, 4, OBJECT_BYTES // 16 // element.itemsize])] * 2, [element] * 2


def keys(first: int, num: int, other: dict[str, Any] | None = None) -> list[ObjectKey]:
    named = {"model_name": "m", "kv_rank": 0x01000100, **(other or {})}
    return [ObjectKey(chunk_hash=number.to_bytes(32, "big"), **named) for number in range(first, first + num)]


def objects(num: int, dtype: str) -> list[MemoryObj]:
    shapes, dtypes = layout(dtype)
    return [
        TensorMemoryObj(
            memory[place * OBJECT_BYTES : (place + 1) * OBJECT_BYTES],
            MemoryObjMetadata(
                shapes[0], dtypes[0], place * OBJECT_BYTES, OBJECT_BYTES, 1, shapes=shapes, dtypes=dtypes
            ),
            None,
        )
        for place in range(num)
    ]


def content(number: int) -> torch.Tensor:
    return torch.randint(256, (OBJECT_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def make(spec: str) -> str:
    """Of what `--l2-adapter` is given; its class, or why there is none."""
    global adapter  # noqa: PLW0603
    try:
        (config,) = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[spec])).adapters
        described = L1MemoryDesc(memory.data_ptr(), memory.numel(), 4096)
        adapter = create_l2_adapter(config, l1_memory_desc=described)
    except ValueError as error:
        return f"ValueError: {error}"
    return type(adapter).__name__


def tags() -> list[str] | None:
    """Return where the bytes are, None for an LMCache that does not ask."""
    if "get_memory_tags" not in L2AdapterInterface.__abstractmethods__:
        return None
    found = adapter.get_memory_tags()
    return [found.segment.value, found.residency.value]


def touch(first: int, num: int) -> None:
    adapter.submit_touch(keys(first, num))


def wait(event_fd: int) -> None:
    poller = select.poll()
    poller.register(event_fd, select.POLLIN)
    assert poller.poll(TIMEOUT_MS), "the eventfd does not tell of an end"
    consume_fd(event_fd)


def store(first: int, num: int, other: dict[str, Any] | None = None, dtype: str = "float16") -> list[int]:
    """Whether LMCache is told that all went well, and how many bytes."""
    stored = objects(num, dtype)
    for place, each in enumerate(stored):
        each.raw_data[:] = content(first + place)
    task_id = adapter.submit_store_task(keys(first, num, other), stored)
    done = {}
    while task_id not in done:
        wait(adapter.get_store_event_fd())
        done |= adapter.pop_completed_store_tasks()
    return [done[task_id].is_successful(), done[task_id].bytes_transferred()]


def find(first: int, num: int, other: dict[str, Any] | None = None, dtype: str | None = "float16") -> list[int]:
    """Which of the objects a look-up finds. Without *dtype* it does not say which layout it means."""
    shapes, dtypes = ([], []) if dtype is None else layout(dtype)
    asked = keys(first, num, other)
    described = {key.object_group_id: MemoryLayoutDesc(shapes, dtypes) for key in asked}
    task_id = adapter.submit_lookup_and_lock_task(asked, described)
    wait(adapter.get_lookup_and_lock_event_fd())
    found = adapter.query_lookup_and_lock_result(task_id)
    assert adapter.query_lookup_and_lock_result(task_id) is None, "a result is given twice"
    adapter.submit_unlock(asked)
    return [first + place for place in found.get_indices_list()]


def load(first: int, num: int, other: dict[str, Any] | None = None, dtype: str = "float16") -> list[list[int]]:
    """Which of the objects are loaded as LMCache is told, and which of these have wrong bytes."""
    memory.zero_()
    loaded = objects(num, dtype)
    task_id = adapter.submit_load_task(keys(first, num, other), loaded)
    wait(adapter.get_load_event_fd())
    bits = adapter.query_load_result(task_id)
    assert adapter.query_load_result(task_id) is None, "a result is given twice"
    places = bits.get_indices_list()
    wrong = [place for place in places if not torch.equal(loaded[place].raw_data, content(first + place))]
    return [[first + place for place in places], [first + place for place in wrong]]


def event_fds() -> list[int]:
    return [adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()]


def status() -> dict[str, Any]:
    return adapter.report_status()


def usage() -> list[float]:
    """Bytes used, capacity, and whether LMCache would evict."""
    used = adapter.get_usage()
    return [used.total_bytes_used, used.total_capacity_bytes, adapter.supports_global_eviction]


def close() -> None:
    adapter.close()


for line in sys.stdin:
    name, *arguments = json.loads(line)
    function: Any = globals()[name]
    print("answer", json.dumps(function(*arguments)), flush=True)
if shm_name:
    os.unlink(f"/dev/shm/{shm_name}")
os._exit(0)
