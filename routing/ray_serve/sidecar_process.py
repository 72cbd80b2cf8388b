"""The process that `NodeSidecar` starts to run `kvtier sidecar`. It gets SIGTERM when the process that started it ends.

The process reads its configuration from standard input, because the configuration may contain secrets.
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
    """Run the sidecar until a signal ends it. Return the exit status. *parent* is the id of the starting process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # when the thread that started this process ends
    if os.getppid() != parent:
        return 0
    config = sidecar_config(None, tables)
    validate(config)
    return run_process(config)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), json.load(sys.stdin)))
