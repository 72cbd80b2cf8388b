"""FolderThread: runs a DocumentFolder in a thread for coroutines. MemoryFiles: used if no folder is configured."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, Self, TypeAlias, TypeVar

from asyncio_extras import call_in_executor

from kvtier.engine.thread_work import guarded
from kvtier.server.documents.document import Document
from kvtier.server.documents.file import Damaged, DocumentFolder, read_all
from kvtier.store.codec.cipher import Cipher

_T = TypeVar("_T")

# A file, and what `DocumentFolder.read` returns or raises for it.
Found: TypeAlias = tuple[Path, tuple[Document, bool] | Damaged]


class DocumentFiles(Protocol):
    """Storage of documents: on disk (`FolderThread`), or none if no folder is configured (`MemoryFiles`)."""

    is_kept: bool

    async def read_all(self) -> list[Found]:
        """Return all files, each with its document or its error; raise OSError if the folder cannot be read."""

    async def write(self, document: Document) -> None:
        """Write a document's file atomically; raise OSError if that fails."""

    async def remove(self, name: str) -> None:
        """Remove the file *name* if it exists; raise OSError if that fails."""

    async def close(self) -> None:
        """Finish earlier calls, and close the folder, so that another process can open it."""


class FolderThread:
    """A DocumentFolder for coroutines. Its methods run in a separate thread, in the order of the calls.

    A call that has started runs to completion even if its caller is cancelled.
    """

    is_kept = True

    def __init__(self, thread: ThreadPoolExecutor, folder: DocumentFolder) -> None:
        """Create an instance for an open *folder*, to use in *thread*. Callers use `open` instead."""
        self._thread = thread
        self._folder = folder

    @classmethod
    async def open(cls, path: Path, cipher: Cipher | None, tokenizer: bytes) -> Self:
        """Start the thread and open the folder in it. Arguments and errors are those of `DocumentFolder`."""
        thread, opened = ThreadPoolExecutor(1, thread_name_prefix="kvtier-documents"), ExitStack()

        def open_folder() -> DocumentFolder:
            return opened.enter_context(DocumentFolder(path, cipher, tokenizer))

        try:
            return cls(thread, await _in_thread(thread, open_folder))
        except BaseException:  # if the caller was cancelled, the folder may be open, or still opening
            thread.submit(opened.close)
            thread.shutdown(wait=False)
            raise

    async def read_all(self) -> list[Found]:
        folder = self._folder
        return await _in_thread(self._thread, lambda: [(folder.path / name, found) for name, found in read_all(folder)])

    async def write(self, document: Document) -> None:
        await _in_thread(self._thread, lambda: self._folder.write(document))

    async def remove(self, name: str) -> None:
        await _in_thread(self._thread, lambda: self._folder.remove(name))

    async def close(self) -> None:
        """Finish earlier calls, and close the folder, even if the caller is cancelled."""
        closing = self._thread.submit(guarded(self._folder.close))
        self._thread.shutdown(wait=False)
        await asyncio.wrap_future(closing)


class MemoryFiles:
    """The replacement for a folder if none is configured. It stores nothing, so documents end with the process."""

    is_kept = False

    async def read_all(self) -> list[Found]:
        return []

    async def write(self, document: Document) -> None:
        """Do nothing, because documents are not stored."""

    async def remove(self, name: str) -> None:
        """Do nothing, because there are no files to remove."""

    async def close(self) -> None:
        """Do nothing, because there is no folder to close."""


async def _in_thread(thread: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
    result: _T = await call_in_executor(guarded(work), executor=thread)
    return result
