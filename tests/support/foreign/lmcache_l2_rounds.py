"""An L2 adapter that LMCache makes, measured round by round: `python lmcache_l2_rounds.py SPEC`.

SPEC is what `--l2-adapter` is given. `ToldScript` tells it what to do; memory above it is shared, as LMCache's server
has it.
"""

import json
import os
import sys
from typing import Any

from lmcache.v1.memory_management import _allocate_cpu_memory
from lmcache_l2_measure import KEY_BYTES, NUM_KEYS, Adapter

_NUM_BYTES = 2 * NUM_KEYS * KEY_BYTES
_SHM_NAME = f"lmcache_rounds_{os.getpid()}"
_memory = _allocate_cpu_memory(_NUM_BYTES, shm_name=_SHM_NAME)
os.unlink(f"/dev/shm/{_SHM_NAME}")  # it is mapped; whoever tells this process ends it with a signal
adapter = Adapter("told", sys.argv[1], _memory)


def round_of(number: int) -> dict[str, float]:
    """Seconds for storing, looking up and loading 32 new keys of 1 MiB."""
    adapter.round(number)
    return {what: seconds[-1] for what, seconds in adapter.seconds.items()}


for line in sys.stdin:
    name, *arguments = json.loads(line)
    function: Any = globals()[name]
    print("answer", json.dumps(function(*arguments)), flush=True)
os._exit(0)
