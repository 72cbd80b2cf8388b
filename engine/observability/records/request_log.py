"""RequestLog: a JSON line for each finished request, in rotated files."""

import errno
import logging
import os
import queue
import stat
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvtier.engine.config import RequestLogConfig
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.trail import Trail
from kvtier.tiers.naming.tier import Tier

log = logging.getLogger(__name__)

MAX_WAITING = 4096  # requests in the queue; further ones are dropped and counted
MAX_AT_ONCE = 256  # requests per write, so that the thread's batch is bounded even if the queue keeps filling
MAX_NAMES = 64  # block names of one prompt in a line
NAME_BYTES = 8  # of each name, as in KV events
CLOSING_S = 10.0  # how long closing waits for a disk that hangs


@dataclass(frozen=True, slots=True)
class LogCounts:
    """Numbers of lines written and dropped since the start."""

    num_written: int
    num_dropped: int


class RequestLog:
    """A log file with a JSON line for each finished request. Its own thread writes, so that callers never block.

    Lines are dropped and counted if the queue is full or the disk fails. Only this user can read the files.
    """

    def __init__(self, path: Path, max_bytes: int, num_files: int) -> None:
        """Open *path* for appending. Raise OSError if that fails.

        A file that would exceed *max_bytes* is renamed to `PATH.1`, the earlier `PATH.1` to `PATH.2`, and so on. At
        most *num_files* files are kept.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._num_files = num_files
        self._waiting: queue.Queue[tuple[RequestRecord, Trail] | None] = queue.Queue(MAX_WAITING)
        self._num_written = self._num_dropped_here = self._num_dropped_there = 0  # the thread sets the first and third
        self._is_failing = False
        self._num_bytes = 0  # size of the current file
        self._file: BinaryIO | None = None
        self._open()
        self._thread = threading.Thread(target=self._run, name="request log", daemon=True)
        self._thread.start()

    def on_record(self, record: RequestRecord, trail: Trail) -> None:
        """Queue the log line of a finished request. *trail* has the names of its prompt's blocks."""
        try:
            self._waiting.put_nowait((record, trail))
        except queue.Full:
            self._num_dropped_here += 1

    def counts(self) -> LogCounts:
        """Return the numbers of lines written and dropped so far. Any thread may call this."""
        return LogCounts(self._num_written, self._num_dropped_here + self._num_dropped_there)

    def close(self) -> None:
        """Write the queued lines and close the file, waiting at most `CLOSING_S`. Idempotent."""
        try:
            self._waiting.put(None, timeout=CLOSING_S)
        except queue.Full:
            return  # the disk hangs; the thread ends with the process
        self._thread.join(CLOSING_S)

    def _run(self) -> None:
        is_open = True
        while is_open:
            waiting = [self._waiting.get()]
            while len(waiting) < MAX_AT_ONCE and not self._waiting.empty():
                waiting.append(self._waiting.get())
            is_open = None not in waiting
            self._write([line_of(*each) for each in waiting if each is not None])
        if self._file is not None:
            self._file.close()

    def _write(self, lines: list[bytes]) -> None:
        """Append the lines. If that fails, count all of them as dropped, even those that were written."""
        try:
            for line in lines:
                file = self._file or self._open()
                if self._num_bytes and self._num_bytes + len(line) > self._max_bytes:
                    file = self._turn(file)
                file.write(line)
                self._num_bytes += len(line)
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._num_dropped_there += len(lines)
            self._give_up(error)
        else:
            self._num_written += len(lines)
            self._is_failing = False

    def _give_up(self, error: OSError) -> None:
        """Close the file, so that the next line reopens it. Log a warning unless the previous write failed, too."""
        if not self._is_failing:
            log.warning("request log: %s cannot be written (%s); lines are dropped until it can", self._path, error)
        self._is_failing = True
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # its buffered lines are lost
                file.close()

    def _turn(self, file: BinaryIO) -> BinaryIO:
        """Rotate the files: begin a new one, and delete the oldest if there are too many."""
        self._file = None
        file.close()
        for number in range(self._num_files - 1, 0, -1):
            before = self._path if number == 1 else _numbered(self._path, number - 1)
            if before.exists():
                os.replace(before, _numbered(self._path, number))
        if self._num_files == 1:
            self._path.unlink()
        return self._open()

    def _open(self) -> BinaryIO:
        self._file = os.fdopen(_opened(self._path), "ab")
        self._num_bytes = os.fstat(self._file.fileno()).st_size
        return self._file


def _opened(path: Path) -> int:
    """Open *path* for appending. It may also be a device, or a pipe that another process reads.

    Raises:
        PermissionError: If the file or pipe belongs to another user, or the file has several hard links.
        OSError: If *path* is a symbolic link, or cannot be opened.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    found = os.fstat(file)
    is_anothers = found.st_uid != os.geteuid() and not stat.S_ISCHR(found.st_mode)
    if is_anothers or (stat.S_ISREG(found.st_mode) and found.st_nlink > 1):
        os.close(file)
        raise PermissionError(errno.EPERM, "it belongs to another user or has several hard links", str(path))
    return file


def refuse_unusable(config: RequestLogConfig) -> None:
    """Raise OSError if the configured log cannot be written. The message says what to do. Create no file."""
    if config.path is None:
        return
    path, folder = Path(config.path), Path(config.path).absolute().parent
    if not folder.exists():
        why = f"there is no folder {folder}; make it, or give another path"
    elif not folder.is_dir():
        why = f"{folder} is not a folder; give another path"
    elif path.is_dir():
        why = f"{path} is a folder; give a file in it"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = f"this user may not write {path if path.exists() else folder}; give another path"
    else:
        return
    raise OSError(f"request log: {why}")


def open_request_log(config: RequestLogConfig) -> RequestLog | None:
    """Open the configured log, if any. Raise OSError if its file cannot be opened; the message says what to do."""
    if config.path is None:
        return None
    refuse_unusable(config)
    try:
        return RequestLog(Path(config.path), config.size, config.files)
    except OSError as error:
        raise OSError(f"request log: {config.path} cannot be opened ({error.strerror}); choose another path") from error


def line_of(record: RequestRecord, trail: Trail) -> bytes:
    """Return a finished request as a JSON line. *trail* has the names of its prompt's blocks.

    docs/how-to/logs.md describes the fields.
    """
    step, names = coarse_names(trail)
    return msgspec.json.encode(_facts(record) | {"grain": step * trail.block_size, "prefix": names}) + b"\n"


def coarse_names(trail: Trail) -> tuple[int, list[str]]:
    """Return a step n, and the names of every n-th block of the prompt, at most `MAX_NAMES` names.

    The step is a power of two, so that the names of two prompts can be compared at the larger of their steps.
    """
    step = 1
    while len(trail.names) // step > MAX_NAMES:
        step *= 2
    return step, [name[:NAME_BYTES].hex() for name in trail.names[step - 1 :: step]]


def _facts(record: RequestRecord) -> dict[str, object]:
    tokens = record.tokens
    return {
        "id": record.request_id,
        "tenant": record.tenant,
        "model": record.model,
        "arrived_at": round(record.arrived_at, 4),
        "prompt_tokens": tokens.num_tokens,
        **{tier.value: getattr(tokens, tier) for tier in Tier},
        "recomputed": tokens.recomputed,
        "copied": tokens.copied,
        "reasons": {reason.value: number for reason, number in tokens.reasons.items() if number},
        "generated": record.num_generated,
        "finish_reason": record.finish_reason,
        **{name: _rounded(getattr(record, name)) for name in ("queue_s", "lookup_s", "load_s", "ttft_s", "total_s")},
        "preempted": record.num_preempted,
        "traceparent": record.traceparent,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
