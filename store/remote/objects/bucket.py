"""`Bucket`: the requests that an object store is asked, by the package obstore; errors in our words, all counted."""

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

_PAGE = 1000  # names that one LIST gives and one DELETE takes
_MAX_AT_ONCE_BYTES = 80 << 20  # a longer object, one whose only block is so long, is put in parts
_PART_BYTES = 16 << 20
_NOT_SO_LONG = re.compile(
    r"\b416 R|InvalidRange"
)  # how a server, and a file system, say that a range is beyond the end
_PRIVATE = 0o700
_SHARED = 0o770  # with the group, if the folder is writable for it: members of the group share the store


class UsageMeter:
    """Adds up `RemoteUsage`. Any thread may call everything."""

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
    """There is no such object, or not any more one of that length."""


class Tail(NamedTuple):
    """The last bytes of an object, how long it is, and its ETag ("" if the store has none)."""

    data: memoryview
    object_bytes: int
    tag: str


class Range(NamedTuple):
    """Bytes of an object, and the ETag of the object that they were read from."""

    data: memoryview
    tag: str


class Bucket:
    """One place in an object store. Any thread may call everything; a call is one request where it does not say more.

    Each ends within three times the settings' timeout, retries included, and raises `RemoteUnavailable` if nobody has
    answered by then or what was asked is refused. An object appears at once or not at all, to everybody.
    """

    def __init__(self, settings: ObjectSettings) -> None:
        self.meter = UsageMeter()
        self.where = settings.url
        self._folder = ObjectFolder.at(settings.url) if settings.scheme == "file" else None
        self._obstore, self._opened = _open(settings)
        self._has_suffixes = settings.scheme != "az"  # Azure knows no range of an object's last bytes

    def close(self) -> None:
        """Let go of the connections, once calls under way have ended; later ones raise `RemoteUnavailable`."""
        self._opened = None

    def read_tail(self, path: str, num_bytes: int) -> Tail | None:
        """The object's last *num_bytes* or fewer, None if there is none. Azure is asked twice."""
        with self._told():
            try:
                return self._read_tail(path, num_bytes)
            except FileNotFoundError:
                return None

    def read_range(self, path: str, start: int, end: int) -> Range:
        """The object's bytes from *start* to *end*, whatever it is by now. Raises `ObjectGone` if it has none there."""
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
        """Put the object, whole, and return its ETag. One that is larger than 80 MiB takes a request for each part."""
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
        """Delete what is below *folder*: a request for each thousand objects to list them, and one to delete them."""
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
        except FileNotFoundError:  # somebody deletes beside us, and the call has ended at the first that was gone
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
        """Errors of the package, whose texts may have an address with a signature, as `RemoteUnavailable`."""
        try:
            yield
        except RemoteUnavailable:
            raise
        except (OSError, ValueError, self._obstore.exceptions.BaseError) as error:
            raise RemoteUnavailable(f"{self.where}: {_reason(error)}") from None


def _open(settings: ObjectSettings) -> tuple[Any, "ObjectStore | None"]:
    """The package and its store; `MissingExtra` without the package, ValueError for settings that it cannot use."""
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
    """What an operator can act on: the kind of the error, and the status or the first cause if it is told."""
    text = str(error).partition("\n")[0]
    status = re.search(r"status(?: code)?:? (\d{3}\b[^:,]{0,30})", text)
    known = {
        FileNotFoundError.__name__: "no such bucket",
        "PermissionDeniedError": "permission denied",
        "UnauthenticatedError": "the credentials were not accepted",
        "NotSupportedError": "the server does not support what is needed",
    }
    told = known.get(type(error).__name__, "no answer")
    return f"{told} (status {status[1].strip()})" if status else told


class ObjectFolder:
    """The folder of a `file://` store. Keys and values in it are the prompts, so no other user may read them.

    Folders have the mode 0700 and objects 0600. If the operator has made the store's folder writable for its group,
    they have 0770 and 0660. Any thread may call everything.
    """

    def __init__(self, root: Path) -> None:
        """Make the folder if there is none. OSError."""
        root.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        self._root = root
        self._mode = _SHARED if root.stat().st_mode & stat.S_IWGRP else _PRIVATE

    @classmethod
    def at(cls, url: str) -> Self:
        """Return the folder of a URL such as `file:///mnt/kv`. ValueError, with what to do, if it cannot be made."""
        path = Path(unquote(urlsplit(url).path))
        try:
            return cls(path)
        except OSError as error:
            raise ValueError(f"object store: {url}: {error.strerror}; give a folder that can be written to") from error

    def make_parents(self, path: str) -> None:
        """Make the folders of an object before it is put, so that nobody sees it before its own mode is set."""
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
        """Set the mode, unless another user has made the file: that one has set it."""
        found = path.stat(follow_symlinks=False)
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o777 != mode:
            path.chmod(mode)
