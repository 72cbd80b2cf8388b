"""A process that runs `kvtier sidecar`, and gets SIGTERM when the process that started it has ended.

It reads its tables, which may contain secrets, from standard input.
"""

import ctypes
import json
import os
import signal
import sys

from kvtier.sidecar.config import sidecar_config
from kvtier.sidecar.process import run_process, validate

_PR_SET_PDEATHSIG = 1


def main(parent: int, tables: dict[str, object]) -> int:
    """Serve engines until a signal, and return the exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # when the thread that started this process ends
    if os.getppid() != parent:
        return 0
    config = sidecar_config(None, tables)
    validate(config)
    return run_process(config)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), json.load(sys.stdin)))
