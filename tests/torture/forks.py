"""The test's side of `fork_server.py`: starts a child, reads its lines, kills it, and tells how it ended."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fork_server import DEADLINE_S

Line = dict[str, Any]


class HangError(AssertionError):
    """A child did not end in time."""


@dataclass
class Ended:
    """The lines of a child, and its status: 0, a positive exit code, or minus the signal that ended it."""

    status: int
    lines: list[Line]

    def of(self, word: str) -> list[Any]:
        """The child's values for *word*, in order."""
        return [line[word] for line in self.lines if word in line]

    def assert_fine(self, context: str, status: int = 0) -> None:
        """Raise AssertionError if the child met an error, or did not end as expected."""
        assert self.of("error") == [], f"{context}: {self.of('error')[0]}"
        assert self.status == status, f"{context}: ended with {describe(self.status)}"


@dataclass
class Child:
    """A child that is running."""

    server: "ForkServer"
    pid: int
    early: deque[Line]  # lines that came before its pid
    lines: list[Line] = field(default_factory=list)
    status: int | None = None

    def listen(self, seconds: float, word: str = "") -> bool:
        """Read lines until *word* comes, the child ends, or time is up; whether more lines may come."""
        for line in self._coming(time.monotonic() + seconds):
            if "status" in line:
                self.status = line["status"]
                return False
            self.lines.append(line)
            if word in line:
                break
        return True

    def _coming(self, until: float) -> Iterator[Line]:
        while self.early:
            yield self.early.popleft()
        yield from self.server.read(until)

    def kill(self) -> Ended:
        """Kill the child with SIGKILL, whatever it is doing."""
        if self.status is None:
            with suppress(ProcessLookupError):  # it has ended by itself just now
                os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self, seconds: float = DEADLINE_S) -> Ended:
        """Wait for the child's end; HangError if it does not come in time."""
        if self.status is None and self.listen(seconds):
            os.kill(self.pid, signal.SIGABRT)  # faulthandler prints where it was
            self.listen(10)
            raise HangError(f"HANG: no end after {seconds:.0f} s; it said last: {self.lines[-3:]}")
        assert self.status is not None
        return Ended(self.status, self.lines)


class ForkServer:
    """A server that has imported the modules that children need; runs one child at a time."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._input = process.stdin
        self._output = process.stdout.fileno()
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)

    def start(self, module: str, stderr: str = "", **arguments: Any) -> Child:
        """Start a child that runs `module.run(say, **arguments)`, with its standard error in the file *stderr*."""
        job = {"module": module, "arguments": arguments, "stderr": stderr}
        self._input.write(json.dumps(job).encode() + b"\n")
        self._input.flush()
        early: deque[Line] = deque()
        for line in self.read(time.monotonic() + DEADLINE_S):
            if "pid" in line:
                return Child(self, line["pid"], early)
            early.append(line)
        raise AssertionError("the fork server is gone")

    def run(self, module: str, seconds: float = DEADLINE_S, **arguments: Any) -> Ended:
        """Start a child and wait for its end."""
        return self.start(module, **arguments).wait(seconds)

    def read(self, until: float) -> Iterator[Line]:
        """The child's lines as they come, until *until* (monotonic)."""
        while True:
            while b"\n" in self._buffer:
                text, _, self._buffer = self._buffer.partition(b"\n")
                try:
                    line = json.loads(text)
                except ValueError:  # a kill cut the line short
                    continue
                yield line
            left = until - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                return
            more = os.read(self._output, 1 << 16)
            if not more:
                return
            self._buffer += more


@contextmanager
def fork_server(*modules: str, environment: Mapping[str, str] | None = None) -> Iterator[ForkServer]:
    """Start a server that imports *modules*, with *environment* added to this process's."""
    program = Path(__file__).with_name("fork_server.py")
    with subprocess.Popen(
        [sys.executable, str(program), *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    ) as process:
        try:
            yield ForkServer(process)
        finally:
            process.kill()


def describe(status: int) -> str:
    """An exit status in words."""
    return f"exit code {status}" if status >= 0 else signal.Signals(-status).name
