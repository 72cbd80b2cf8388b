"""Imports once, then forks a child for each job: a JSON line on standard input. What children say is standard output.

A job names a module of this folder, the arguments of its `run`, and where its errors go ("": where ours do). A line of
output is a JSON object: {"pid": ...} when the child starts, what the child says, and {"status": ...} when it is gone:
its exit code, or minus the number of the signal that ended it.
"""

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

Say = Callable[..., None]
DEADLINE_S = 600.0  # for what takes seconds: reached only when a test fails
_LATEST_S = 1800.0  # when a child that hangs, and that no test has killed, prints where it is and ends
_PR_SET_PDEATHSIG = 1


def make_say(output: int) -> Say:
    """Writes its arguments as one line, one thread at a time. A kill may cut the last line short, no earlier one."""
    lock = threading.Lock()

    def say(**fields: Any) -> None:
        line = json.dumps(fields).encode() + b"\n"
        with lock:
            while line:
                line = line[os.write(output, line) :]

    return say


def run_child(job: dict[str, Any], say: Say) -> int:
    if job["stderr"]:
        os.dup2(os.open(job["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a test that fails leaves no process behind
    faulthandler.enable()
    faulthandler.dump_traceback_later(_LATEST_S, exit=True)
    try:
        importlib.import_module(job["module"]).run(say, **job["arguments"])
    except BaseException:  # a child's top: the error goes to its parent
        say(error=traceback.format_exc(limit=-4))
        return 1
    return 0


def main() -> None:
    output = os.dup(1)
    os.dup2(2, 1)
    say = make_say(output)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(run_child(job, say))
        say(pid=child)
        _, status = os.waitpid(child, 0)
        os.write(output, b"\n")  # ends a line that was cut short
        say(status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test ends this process
    main()
