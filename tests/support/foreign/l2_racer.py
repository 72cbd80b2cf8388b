"""L2 adapters that LMCache makes, and that store when told: `python l2_racer.py SOURCE_BYTES`.

A line is a JSON list, a function's name and its arguments; the answer is a line that begins with `answer`. The bytes to
store are in LMCache's shared memory, as its server has them on a CPU.
"""

import argparse
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

from lmcache.cli.commands.bench.l2_adapter_bench.data import (
    create_l1_memory_desc,
    make_memory_objects,
    make_object_keys,
)
from lmcache.cli.commands.bench.l2_adapter_bench.runner import bench_store
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import _allocate_cpu_memory

_SOURCE_BYTES = int(sys.argv[1])
_SHM_NAME = f"lmcache_race_{os.getpid()}"
_memory = _allocate_cpu_memory(_SOURCE_BYTES, shm_name=_SHM_NAME)
os.unlink(f"/dev/shm/{_SHM_NAME}")  # it is mapped; whoever tells this process ends it with a signal
_adapters: dict[str, Any] = {}


def make(name: str, spec: str) -> None:
    """Make the adapter *name* of what `--l2-adapter` is given."""
    (config,) = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[spec])).adapters
    _adapters[name] = create_l2_adapter(config, l1_memory_desc=create_l1_memory_desc(_memory, 4096))


def store(name: str, number: int, num_keys: int, key_bytes: int) -> list[float]:
    """Store batch *number*, of new keys; return the seconds and the CPU seconds of this process."""
    keys = make_object_keys(num_keys, key_offset=num_keys * number)
    start = number * num_keys * key_bytes % _SOURCE_BYTES
    objects = make_memory_objects(_memory, num_keys, key_bytes, start, fill_offset=number)
    before = time.process_time()
    seen = bench_store(
        _adapters[name],
        in_flight=1,
        num_keys=num_keys,
        data_size=key_bytes,
        rounds=1,
        keys_for_round=lambda _: [keys],
        objs_for_round=lambda _: [objects],
        log=lambda line: None,
    )
    cpu_s = time.process_time() - before
    assert seen.success_counts == [num_keys], f"{name}: {seen.success_counts} keys, not {num_keys}"
    return [seen.round_durations[0], cpu_s]


for line in sys.stdin:
    called, *arguments = json.loads(line)
    function: Any = globals()[called]
    print("answer", json.dumps(function(*arguments)), flush=True)
os._exit(0)
