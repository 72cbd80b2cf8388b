"""FolderThread: a folder of documents in a thread of its own, for coroutines; NoFolder: documents that are not kept."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, Self, TypeAlias, TypeVar

from asyncio_extras import call_in_executor

from kvtier.engine.documents.document import Document
from kvtier.engine.documents.file import Damaged, DocumentFolder, read_all
from kvtier.engine.thread_work import guarded
from kvtier.store.codec.cipher import Cipher

_T = TypeVar("_T")

Found: TypeAlias = tuple[Path, tuple[Document, bool] | Damaged]  # a file, and what `DocumentFolder.read` says of it


class Keeping(Protocol):
    """Where documents survive the process, or do not."""

    is_kept: bool

    async def read_all(self) -> list[Found]:
        """All that is there. OSError."""

    async def write(self, document: Document) -> None:
        """Have it there, whole, or what was there before. OSError."""

    async def remove(self, name: str) -> None:
        """Remove the file of that name. OSError."""

    async def close(self) -> None:
        """Let others open the folder, when all that was asked for is done."""


class FolderThread:
    """The folder is touched by its thread only, in the order in which it was asked. What was begun is done, also if
    its caller is cancelled meanwhile."""

    is_kept = True

    def __init__(self, thread: ThreadPoolExecutor, folder: DocumentFolder) -> None:
        """Takes over both. `open` makes one."""
        self._thread = thread
        self._folder = folder

    @classmethod
    async def open(cls, path: Path, cipher: Cipher | None, tokenizer: bytes) -> Self:
        """Arguments and errors as of `DocumentFolder`."""
        thread, opened = ThreadPoolExecutor(1, thread_name_prefix="kvtier-documents"), ExitStack()

        def open_folder() -> DocumentFolder:
            return opened.enter_context(DocumentFolder(path, cipher, tokenizer))

        try:
            return cls(thread, await _in_thread(thread, open_folder))
        except BaseException:  # of a caller that was cancelled the folder may be open, or be opened still
            thread.submit(opened.close)
            thread.shutdown(wait=False)
            raise

    async def read_all(self) -> list[Found]:
        """All that is there. OSError."""
        folder = self._folder
        return await _in_thread(self._thread, lambda: [(folder.path / name, found) for name, found in read_all(folder)])

    async def write(self, document: Document) -> None:
        """Have it there, whole, or what was there before. OSError."""
        await _in_thread(self._thread, lambda: self._folder.write(document))

    async def remove(self, name: str) -> None:
        """Remove the file of that name. OSError."""
        await _in_thread(self._thread, lambda: self._folder.remove(name))

    async def close(self) -> None:
        """Let others open the folder, when all that was asked for is done. Cancelled, it is closed all the same."""
        closing = self._thread.submit(guarded(self._folder.close))
        self._thread.shutdown(wait=False)
        await asyncio.wrap_future(closing)


class NoFolder:
    """Documents end with the process."""

    is_kept = False

    async def read_all(self) -> list[Found]:
        """Nothing."""
        return []

    async def write(self, document: Document) -> None:
        """Nowhere."""

    async def remove(self, name: str) -> None:
        """It is not there."""

    async def close(self) -> None:
        """Nothing is open."""


async def _in_thread(thread: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
    result: _T = await call_in_executor(guarded(work), executor=thread)
    return result
