"""How fast are L2 adapters, by the functions of `lmcache bench l2`? lmcache_l2_measure.py ROUNDS MEMORY NAME=JSON ...

Runs in the environment that install.py makes. The adapters are made by LMCache, of what `--l2-adapter` is given, and
take turns in one process. MEMORY is LMCache's own, above them: `shared`, as its server has it, or `private`, as
`lmcache bench l2` has it. Prints one JSON object: for each name the seconds of each round, by what was done.
"""

import argparse
import json
import os
import sys
from collections import defaultdict

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch  # lmcache reads the environment
from lmcache.cli.commands.bench.l2_adapter_bench.data import (
    create_l1_memory_desc,
    make_aligned_tensor,
    make_memory_objects,
    make_object_keys,
)
from lmcache.cli.commands.bench.l2_adapter_bench.runner import bench_load, bench_lookup, bench_store
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import _allocate_cpu_memory, _free_cpu_memory

NUM_KEYS = 32
KEY_BYTES = 1 << 20
ALIGNMENT = 4096


class Adapter:
    """One adapter, and the seconds that it took."""

    def __init__(self, name: str, spec: str, memory: torch.Tensor) -> None:
        self.name = name
        self.seconds: dict[str, list[float]] = defaultdict(list)
        (config,) = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[spec])).adapters
        self._adapter = create_l2_adapter(config, l1_memory_desc=create_l1_memory_desc(memory, ALIGNMENT))
        self._stored = make_memory_objects(memory, NUM_KEYS, KEY_BYTES, 0)
        self._loaded = make_memory_objects(memory, NUM_KEYS, KEY_BYTES, NUM_KEYS * KEY_BYTES, fill_offset=1)

    def round(self, number: int) -> None:
        """Store, look up and load keys that are new, each time after the others have had their turn."""
        keys = make_object_keys(NUM_KEYS, key_offset=NUM_KEYS * number)
        absent = make_object_keys(NUM_KEYS, key_offset=NUM_KEYS * (number + 1_000_000))
        whole = {"in_flight": 1, "num_keys": NUM_KEYS, "rounds": 1, "log": lambda line: None}
        sized = whole | {"data_size": KEY_BYTES, "keys_for_round": lambda _: [keys]}
        self._take("store", bench_store(self._adapter, objs_for_round=lambda _: [self._stored], **sized), NUM_KEYS)
        for what, asked, limit in (("lookup of hits", keys, NUM_KEYS), ("lookup of misses", absent, 0)):
            self._take(what, bench_lookup(self._adapter, keys_for_round=lambda _, a=asked: [a], **whole), limit)
        for what in ("load", "load again"):
            self._take(what, bench_load(self._adapter, objs_for_round=lambda _: [self._loaded], **sized), NUM_KEYS)
            for stored, loaded in zip(self._stored, self._loaded, strict=True):
                assert torch.equal(stored.raw_data, loaded.raw_data), f"{self.name} has loaded other bytes"

    def close(self) -> None:
        """Close the adapter."""
        self._adapter.close()

    def _take(self, what: str, seen, num_good: int) -> None:
        assert seen.success_counts == [num_good], f"{self.name}: {what}: {seen.success_counts} keys, not {num_good}"
        self.seconds[what] += seen.round_durations


def main() -> None:
    """Measure all adapters in turns."""
    num_rounds, num_bytes = int(sys.argv[1]), 2 * NUM_KEYS * KEY_BYTES
    shm_name = f"lmcache_measured_{os.getpid()}" if sys.argv[2] == "shared" else None
    if shm_name is None:
        memory = make_aligned_tensor(num_bytes, ALIGNMENT)
    else:
        memory = _allocate_cpu_memory(num_bytes, shm_name=shm_name)
    adapters = [Adapter(*argument.split("=", 1), memory) for argument in sys.argv[3:]]
    for number in range(num_rounds + 1):
        for adapter in adapters if number % 2 else adapters[::-1]:
            adapter.round(number)
    for adapter in adapters:
        adapter.close()
    if shm_name is not None:
        _free_cpu_memory(memory, num_bytes, shm_name=shm_name)
    print(json.dumps({adapter.name: {what: s[1:] for what, s in adapter.seconds.items()} for adapter in adapters}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
