"""Calls of functions in a separate process, because reading a damaged memory-mapped file may kill the process."""

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import IO, Any, ParamSpec, TypeVar

from kvtier.store.process.channel import portable

_END_TIMEOUT_S = 5.0  # limit for closing a store after the caller has stopped reading

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Crashed(RuntimeError):
    """An error for a process that ended before its function returned.

    *signal_name* is the signal that ended the process, or "" if none did. *last_words* is the last line of its output.
    """

    def __init__(self, signal_name: str, last_words: str) -> None:
        super().__init__(f"the separate process ended early: {signal_name or last_words}")
        self.signal_name = signal_name


def call_in_process(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call *function* in a new process, and return its result or raise its exception.

    Raises `Crashed` if the process ends before *function* returns.
    """
    with _process(function, args, kwargs) as items:
        (result,) = items
    return result  # type: ignore[no-any-return]  # unpickled


@contextmanager
def iterate_in_process(
    generator: Callable[_P, Iterator[_T]], *args: _P.args, **kwargs: _P.kwargs
) -> Iterator[Iterator[_T]]:
    """Iterate over the items of *generator* in a separate process. Raise `Crashed` if the process ends early.

    At the end of the `with` block the generator is closed, and the process is killed if this takes more than 5 s.
    Ctrl-C in a terminal does not reach the process. If the caller is killed, the generator is closed at its next item.
    """
    with _process(generator, args, kwargs) as items:
        yield items


@contextmanager
def _process(*job: Any) -> Iterator[Iterator[Any]]:
    here, there = socket.socketpair()
    with tempfile.TemporaryFile() as errors:
        with there:
            process = subprocess.Popen(
                # -P keeps the working directory out of the module search path.
                [sys.executable, "-P", "-m", __name__, str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        connection: Connection[Any, Any] = Connection(here.detach())
        try:
            with connection:
                yield _listen(connection, process, errors, job)
        finally:
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
                process.wait()


def _listen(
    connection: "Connection[Any, Any]", process: "subprocess.Popen[bytes]", errors: IO[bytes], job: tuple[Any, ...]
) -> Iterator[Any]:
    for kind, what in _received(connection, process, errors, job):
        if kind == "end":
            return
        if kind == "error":
            raise what
        yield what


def _received(
    connection: "Connection[Any, Any]", process: "subprocess.Popen[bytes]", errors: IO[bytes], job: tuple[Any, ...]
) -> Iterator[tuple[str, Any]]:
    try:
        connection.send(job)
        while True:
            yield connection.recv()
    except (EOFError, ConnectionError) as error:
        status = process.wait()
        errors.seek(0)
        last_words = errors.read().decode(errors="replace").strip().splitlines()[-1:] or [f"status {status}"]
        raise Crashed(signal.Signals(-status).name if status < 0 else "", last_words[0]) from error


def main() -> None:
    """Receive a function and its arguments over a connection, call it, and send the results back.

    The first command-line argument is the file descriptor of the connection.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    job = connection.recv()
    with contextlib.suppress(ConnectionError), contextlib.closing(_messages(*job)) as messages:
        for message in messages:
            connection.send(message)  # raises ConnectionError if the caller has closed its end


def _messages(function: Callable[..., Any], args: Any, kwargs: Any) -> Generator[tuple[str, Any], None, None]:
    try:
        result = function(*args, **kwargs)
        if isinstance(result, Generator):
            with contextlib.closing(result):
                for item in result:
                    yield "item", item
        else:
            yield "item", result
        yield "end", None
    except Exception as error:  # raised again in the calling process
        error.add_note(traceback.format_exc())
        yield "error", portable(error)


if __name__ == "__main__":
    main()
