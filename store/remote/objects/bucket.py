"""`Bucket`: requests to an object store, sent by the package obstore, with kvtier's own errors and a request count."""

import os
import re
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from kvtier.extras import extra
from kvtier.store.remote.object_settings import ObjectSettings
from kvtier.store.remote_store import RemoteUnavailable, RemoteUsage

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_PAGE = 1000  # names per LIST response and per DELETE
_MAX_AT_ONCE_BYTES = 80 << 20  # a larger object (which has a single, large block) is uploaded in parts
_PART_BYTES = 16 << 20  # of such an upload, in one request
_NOT_SO_LONG = re.compile(r"\b416 R|InvalidRange")  # how servers and file systems report that a range is beyond the end
_PRIVATE = 0o700
_SHARED = 0o770  # if the folder is writable for its group, whose members then share the store


class UsageMeter:
    """A counter that adds up the `RemoteUsage` of all requests. All methods are thread-safe."""

    def __init__(self) -> None:
        self._usage = RemoteUsage()
        self._lock = threading.Lock()

    def add(self, more: RemoteUsage) -> None:
        with self._lock:
            before = self._usage
            sums = {f.name: getattr(before, f.name) + getattr(more, f.name) for f in fields(RemoteUsage)}
            self._usage = RemoteUsage(**sums)

    def usage(self) -> RemoteUsage:
        with self._lock:
            return self._usage


class ObjectGone(Exception):
    """Error raised if there is no such object, or if it no longer has the requested bytes."""


class Tail(NamedTuple):
    """The last bytes of an object, the object's length, and its ETag ("" if the store has none)."""

    data: memoryview
    object_bytes: int
    tag: str


class Range(NamedTuple):
    """Bytes of an object, and the object's ETag when they were read ("" if the store has none)."""

    data: memoryview
    tag: str


class Bucket:
    """A client of one location in an object store. All methods are thread-safe.

    A method sends one request unless its docstring says otherwise. Each call ends within three times the timeout in
    *settings*, retries included. It raises `RemoteUnavailable` on a timeout or if the request is refused. All clients
    see a new object at the same time, and never a part of it.
    """

    def __init__(self, settings: ObjectSettings) -> None:
        self.meter = UsageMeter()
        self.where = settings.url
        self._folder = ObjectFolder.at(settings.url) if settings.scheme == "file" else None
        self._obstore, self._opened = _open(settings)
        self._has_suffixes = settings.scheme != "az"  # Azure has no range for an object's last bytes

    def close(self) -> None:
        """Release the connections once calls in progress have ended. Later calls raise `RemoteUnavailable`."""
        self._opened = None

    def read_tail(self, path: str, num_bytes: int) -> Tail | None:
        """Return up to *num_bytes* from the object's end, or None if there is no object. Azure needs two requests."""
        with self._told():
            try:
                return self._read_tail(path, num_bytes)
            except FileNotFoundError:
                return None

    def read_range(self, path: str, start: int, end: int) -> Range:
        """Return the bytes from *start* to *end* of the object that now has this path.

        Raises `ObjectGone` if the object has no such bytes.
        """
        self.meter.add(RemoteUsage(num_reads=1))
        with self._told():
            try:
                result = self._obstore.get(self._store, path, options={"range": (start, end)})
                data = memoryview(result.bytes())
            except FileNotFoundError:
                raise ObjectGone from None
            except self._obstore.exceptions.GenericError as error:
                if _NOT_SO_LONG.search(str(error)):
                    raise ObjectGone from None
                raise
        if data.nbytes != end - start:
            raise ObjectGone
        return Range(data, result.meta["e_tag"] or "")

    def put(self, path: str, data: memoryview) -> str:
        """Put a whole object and return its ETag. An object larger than 80 MiB takes several requests."""
        in_parts = len(data) > _MAX_AT_ONCE_BYTES
        num_requests = -(-len(data) // _PART_BYTES) + 2 if in_parts else 1
        self.meter.add(RemoteUsage(num_writes=num_requests))
        with self._told():
            if self._folder is not None:
                self._folder.make_parents(path)
            done = self._obstore.put(self._store, path, data, use_multipart=in_parts, chunk_size=_PART_BYTES)
            if self._folder is not None:
                self._folder.make_private(path)
        return done["e_tag"] or ""

    def delete_all(self, folder: str) -> None:
        """Delete everything below *folder*, with a LIST and a DELETE request for each thousand objects."""
        with self._told():
            pages = list(self._obstore.list(self._store, folder, chunk_size=_PAGE))
        self.meter.add(RemoteUsage(num_writes=2 * len(pages) or 1))
        for page in pages:
            with self._told():
                self._delete([meta["path"] for meta in page])

    def _read_tail(self, path: str, num_bytes: int) -> Tail:
        self.meter.add(RemoteUsage(num_questions=1))
        if self._has_suffixes:
            result = self._obstore.get(self._store, path, options={"range": {"suffix": num_bytes}})
        else:
            size = self._obstore.head(self._store, path)["size"]
            self.meter.add(RemoteUsage(num_questions=1))
            span = (max(size - num_bytes, 0), size)
            result = self._obstore.get(self._store, path, options={"range": span} if size else {})
        return Tail(memoryview(result.bytes()), result.meta["size"], result.meta["e_tag"] or "")

    def _delete(self, paths: Sequence[str]) -> None:
        try:
            self._obstore.delete(self._store, list(paths))
        except FileNotFoundError:  # another client deletes too, and the call stopped at the first missing object
            for path in paths:
                try:
                    self._obstore.delete(self._store, path)
                except FileNotFoundError:
                    continue

    @property
    def _store(self) -> "ObjectStore":
        opened = self._opened
        if opened is None:
            raise RemoteUnavailable("the store is closed")
        return opened

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Convert obstore's errors to `RemoteUnavailable`, without their text, which may contain a signed URL."""
        try:
            yield
        except RemoteUnavailable:
            raise
        except (OSError, ValueError, self._obstore.exceptions.BaseError) as error:
            raise RemoteUnavailable(f"{self.where}: {_reason(error)}") from None


def _open(settings: ObjectSettings) -> tuple[Any, "ObjectStore | None"]:
    """Return the package obstore and its client for *settings*.

    Raises `MissingExtra` if the package is not installed, and ValueError for unusable settings.
    """
    with extra("object", "an object store"):
        import obstore

    try:
        return obstore, _store_of(settings)
    except (OSError, obstore.exceptions.BaseError) as error:
        told = str(error).partition("\n")[0]
        raise ValueError(f"object store: {settings.url} cannot be used: {told}") from None


def _store_of(settings: ObjectSettings) -> "ObjectStore":
    from obstore.store import from_url

    if settings.scheme == "file":
        return from_url(settings.url, mkdir=True)
    timeout = timedelta(seconds=settings.timeout_s)
    given = {"endpoint": settings.endpoint, "region": settings.region}
    store: ObjectStore = from_url(
        settings.url,
        config={name: value for name, value in given.items() if value},  # type: ignore[call-overload]
        client_options={
            "timeout": timeout,
            "connect_timeout": min(timeout, timedelta(seconds=5)),
            "allow_http": settings.allow_http,
        },
        retry_config={
            "max_retries": 2,
            "retry_timeout": timeout,
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timeout / 4, "base": 2},
        },
    )
    return store


def _reason(error: Exception) -> str:
    """Describe *error* so that an operator can act on it: its kind, and the HTTP status if there is one."""
    text = str(error).partition("\n")[0]
    status = re.search(r"status(?: code)?:? (\d{3}\b[^:,]{0,30})", text)
    known = {
        FileNotFoundError.__name__: "no such bucket",
        "PermissionDeniedError": "permission denied",
        "UnauthenticatedError": "the credentials were not accepted",
        "NotSupportedError": "the server does not support a required feature",
    }
    told = known.get(type(error).__name__, "no answer")
    return f"{told} (status {status[1].strip()})" if status else told


class ObjectFolder:
    """The folder of a `file://` store, which sets the permissions of the files in it.

    Keys and values reveal the prompts, so other users must not read them. Folders get the mode 0700 and objects 0600.
    If the operator has made the store's folder writable for its group, the modes are 0770 and 0660. All methods are
    thread-safe.
    """

    def __init__(self, root: Path) -> None:
        """Create the folder if there is none. Raises OSError."""
        root.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        self._root = root
        self._mode = _SHARED if root.stat().st_mode & stat.S_IWGRP else _PRIVATE

    @classmethod
    def at(cls, url: str) -> Self:
        """Return the folder of a URL such as `file:///mnt/kv`.

        Raises ValueError, with what to do, if the folder cannot be created.
        """
        path = Path(unquote(urlsplit(url).path))
        try:
            return cls(path)
        except OSError as error:
            raise ValueError(f"object store: {url}: {error.strerror}; give a folder that can be written to") from error

    def make_parents(self, path: str) -> None:
        """Create the private folders that contain an object, before the object is put.

        Otherwise other users could read the object until its own mode is set.
        """
        folder = self._root
        for name in Path(path).parts[:-1]:
            folder /= name
            with suppress(FileExistsError):
                folder.mkdir(mode=self._mode)
            self._set_mode(folder, self._mode)

    def make_private(self, path: str) -> None:
        """Set the mode of an object that was put."""
        with suppress(FileNotFoundError):  # another process has evicted it
            self._set_mode(self._root / path, self._mode & 0o660)

    def _set_mode(self, path: Path, mode: int) -> None:
        """Set the mode of *path* if this process's user owns it. Otherwise the owner's process has set the mode."""
        found = path.stat(follow_symlinks=False)
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o777 != mode:
            path.chmod(mode)
