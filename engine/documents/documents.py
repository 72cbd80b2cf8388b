"""Documents: all there are, of all tenants; computed in the background, kept warm, and there again after a restart."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from asyncio_extras import call_in_executor
from jinja2.exceptions import TemplateError

from kvtier.engine.async_llm import AsyncLLM
from kvtier.engine.config import Config
from kvtier.engine.core import EngineCore
from kvtier.engine.documents.document import MOST_PINNED_S, Document, check_id
from kvtier.engine.documents.draft import Draft, tokenizer_digest, tokens_of
from kvtier.engine.documents.file import Damaged, DocumentFolder, file_name, read_all, tenant_prefix
from kvtier.engine.documents.pin_shares import PinShares
from kvtier.engine.documents.worker import DocumentWorker, Residence, Status
from kvtier.engine.text.least_tokens import TooManyTokens
from kvtier.engine.thread_work import guarded
from kvtier.store.codec.cipher import Cipher
from kvtier.tiers.naming.block_hash import ExtraKeys
from kvtier.tiers.naming.tier import Tier

log = logging.getLogger(__name__)

_NUM_AT_ONCE = 8  # documents that are looked at between two steps

_T = TypeVar("_T")


class TooManyDocuments(Exception):
    """The tenant has as many as it may; says what to do."""


class Documents:
    """Documents by tenant and id; nobody comes to another tenant's. Owned by the event loop.

    With a folder each change is on disk before it is answered; without one documents end with the process. A change
    goes on to its end if its caller is cancelled, so that the folder, this and the engine's thread say the same.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        extra_of: Callable[[EngineCore, Document], ExtraKeys],
        shares: PinShares,
        most_per_tenant: int,
    ) -> None:
        """*extra_of*: what a document's blocks are named with beside its tokens; ValueError if its adapter is not
        there. It is called in the engine's thread. *shares*: what may be pinned."""
        self._llm = llm
        self._extra_of = extra_of
        self._most_per_tenant = most_per_tenant
        self._documents: dict[tuple[str | None, str], Document] = {}
        self._damaged: dict[str, str] = {}  # files, and why
        self._folder: DocumentFolder | None = None
        self._disk_thread = ThreadPoolExecutor(1, thread_name_prefix="kvtier-documents")
        # One change of a tenant's at a time: what is on disk and here are the same, and no tenant waits for another's.
        self._changing: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._changes: set[asyncio.Task[object]] = set()  # under way, or waiting for their turn
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()

        def became_ready(document: Document) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._became_ready, document)

        self._worker = DocumentWorker(extra_of, became_ready, shares)

    @classmethod
    async def open(
        cls, llm: AsyncLLM, config: Config, extra_of: Callable[[EngineCore, Document], ExtraKeys], shares: PinShares
    ) -> Self:
        """Those that were there when the last process ended, with their pins. What was not computed yet is queued.

        OSError if there is a folder and it cannot be used, FolderInUse if another process has it.
        """
        documents = cls(llm, extra_of, shares, config.documents.max_per_tenant)
        try:
            await documents._open(config)
        except BaseException:  # or what was held for documents that nobody has would stay held
            documents._is_closed = True
            llm.neglect(documents._worker.tick, documents._worker.end)
            documents._end_disk_thread()
            raise
        return documents

    @property
    def are_kept(self) -> bool:
        """Whether they survive the process."""
        return self._folder is not None

    def of(self, tenant: str | None) -> list[Document]:
        """All of the tenant's, the oldest first."""
        found = [document for (whose, _), document in self._documents.items() if whose == tenant]
        return sorted(found, key=lambda document: document.created_at)

    def find(self, tenant: str | None, document_id: str) -> Document | None:
        """The tenant's document of that id."""
        return self._documents.get((tenant, document_id))

    def damaged(self, tenant: str | None) -> dict[str, str]:
        """The tenant's files that could not be read, and why."""
        prefix = tenant_prefix(tenant)
        return {name: why for name, why in self._damaged.items() if name.startswith(prefix)}

    def damage(self, tenant: str | None, document_id: str) -> str | None:
        """Why the file of the tenant's document of that id could not be read, if so."""
        return self._damaged.get(file_name(tenant, document_id))

    async def put(
        self, tenant: str | None, document_id: str, draft: Draft, most_tokens: int | None = None
    ) -> tuple[Document, bool]:
        """The document, which will be computed; and whether it is new. One that is there and says something else is
        replaced.

        ValueError for an id, a text or tokens that cannot be; jinja2's TemplateError if the chat template does not take
        it; TooManyDocuments; OSError, and nothing has changed, if it cannot be written. Cancelled while the text is
        tokenized it has done nothing; later it is done all the same.
        """
        check_id(document_id)
        limit = self._llm.tokenizers.limit(self._longest(most_tokens))
        form, token_ids = await self._llm.with_tokenizer(lambda tokenizer: tokens_of(draft, tokenizer, limit), tenant)
        document = Document(
            document_id,
            tenant,
            form,
            draft.text,
            draft.system,
            np.array(token_ids, np.int32),
            draft.lora,
            draft.cache_salt,
            time.time(),
        )
        self._check_length(document, most_tokens)
        await self._llm.ask(lambda core: core.chain((), self._extra_of(core, document)))
        return await self._whole(tenant, lambda: self._put(document))

    async def residence(self, document: Document) -> Residence:
        """Where it is now."""
        (residence,) = await self.residences([document])
        return residence

    async def residences(self, documents: Sequence[Document]) -> list[Residence]:
        """The same of several. The engine's steps go on in between."""
        found: list[Residence] = []
        for start in range(0, len(documents), _NUM_AT_ONCE):
            some = documents[start : start + _NUM_AT_ONCE]
            found += await self._llm.ask(partial(_residences, self._worker, some))
        return found

    async def warm(self, document: Document, tier: Tier) -> None:
        """Begin to bring it to the device or to host memory. NoRoomToPin."""
        await self._llm.ask(lambda core: self._worker.warm(core, document, tier))

    async def pin(self, document: Document, ttl_s: float) -> None:
        """Keep it in host memory for so long from now on, over restarts. NoRoomToPin; OSError if that cannot be
        written down, and then it is not pinned."""
        await self._whole(document.tenant, lambda: self._pin(document, min(ttl_s, MOST_PINNED_S)))

    async def unpin(self, document: Document) -> None:
        """Keep it no longer. OSError if that cannot be written down, and then it stays pinned."""
        await self._whole(document.tenant, lambda: self._unpin(document))

    async def delete(self, tenant: str | None, document_id: str) -> bool:
        """Forget it, or its damaged file; False if there is neither. OSError, and it is still there, if its file cannot
        be removed. Its blocks stay cached until others need their room."""
        return await self._whole(tenant, lambda: self._delete(tenant, document_id))

    async def close(self) -> None:
        """Have all written, and let others open the folder. The engine has to run still, or to have ended; it keeps
        what it holds until it ends. Cancelled, closing goes on; again, it waits for the same."""
        self._is_closed = True
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _open(self, config: Config) -> None:
        llm = self._llm
        await llm.attend(self._worker.tick)
        if (path := documents_path(config)) is None:
            log.info("documents last as long as this process; to keep them give [documents] a path, or have a [disk]")
            return
        cipher = await llm.ask(lambda core: core.cipher)
        tokenizer = await llm.with_tokenizer(tokenizer_digest)
        await self._read(await self._on_disk(lambda: self._open_folder(path, cipher, tokenizer)))

    def _open_folder(self, path: Path, cipher: Cipher | None, tokenizer: bytes) -> DocumentFolder:
        """In the disk's thread, which knows of it then even if the one who asked has been cancelled."""
        self._folder = folder = DocumentFolder(path, cipher, tokenizer)
        return folder

    def _close_folder(self) -> None:
        if self._folder is not None:
            self._folder.close()

    async def _close(self) -> None:
        while self._changes:
            await asyncio.wait(self._changes)
        await asyncio.wrap_future(self._end_disk_thread())

    def _end_disk_thread(self) -> "Future[None]":
        """Have it do what it was given, and close the folder."""
        closed = self._disk_thread.submit(self._close_folder)
        self._disk_thread.shutdown(wait=False)
        return closed

    async def _whole(self, tenant: str | None, change: Callable[[], Coroutine[object, object, _T]]) -> _T:
        """What *change* comes to, in its turn; once it is asked for it is made, whatever becomes of the caller."""
        return await asyncio.shield(self._begin(tenant, change))

    def _begin(self, tenant: str | None, change: Callable[[], Coroutine[object, object, _T]]) -> "asyncio.Task[_T]":
        task = asyncio.create_task(self._in_turn(tenant, change))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return task

    async def _in_turn(self, tenant: str | None, change: Callable[[], Coroutine[object, object, _T]]) -> _T:
        async with self._changing[tenant]:
            return await change()

    async def _put(self, document: Document) -> tuple[Document, bool]:
        tenant = document.tenant
        before = self.find(tenant, document.id)
        if before is not None and before.is_as(document):
            if (await self.residence(before)).status in (Status.FAILED, Status.EVICTED):
                await self.warm(before, Tier.DEVICE)
            return before, False
        if before is None and len(self.of(tenant)) >= self._most_per_tenant:
            raise TooManyDocuments(f"there are {self._most_per_tenant} documents already; delete one")
        await self._write(document)
        if before is not None:
            await self._llm.ask(lambda core: self._worker.drop(core, before))
        self._documents[tenant, document.id] = document
        self._damaged.pop(file_name(tenant, document.id), None)
        await self._llm.ask(lambda core: self._worker.add(core, document))
        return document, before is None

    async def _pin(self, document: Document, ttl_s: float) -> None:
        await self._llm.ask(lambda core: self._worker.pin(core, document, ttl_s))
        try:
            await self._set_pin(document, time.time() + ttl_s)
        except OSError:
            await self._llm.ask(lambda core: self._worker.unpin(core, document))
            raise

    async def _unpin(self, document: Document) -> None:
        if document.pinned_until is not None:
            await self._set_pin(document, None)
            await self._llm.ask(lambda core: self._worker.unpin(core, document))

    async def _delete(self, tenant: str | None, document_id: str) -> bool:
        document, name = self.find(tenant, document_id), file_name(tenant, document_id)
        if document is None and name not in self._damaged:
            return False
        if (folder := self._folder) is not None:
            await self._on_disk(lambda: folder.remove(name))
        self._damaged.pop(name, None)
        if document is not None:
            del self._documents[tenant, document_id]
            await self._llm.ask(lambda core: self._worker.drop(core, document))
        return True

    async def _read(self, folder: DocumentFolder) -> None:
        """Take in what is in the folder."""
        found = await self._on_disk(lambda: list(read_all(folder)))
        known: list[tuple[Document, bool]] = []
        for name, outcome in found:
            if isinstance(outcome, Damaged):
                self._damaged[name] = str(outcome)
                log.warning("documents: %s is left out: %s", folder.path / name, outcome)
            else:
                known.append(outcome)
        for document, is_of_tokenizer in sorted(known, key=lambda pair: pair[0].created_at):
            await self._take_in(document, is_of_tokenizer)

    async def _take_in(self, document: Document, is_of_tokenizer: bool) -> None:
        left_s = 0.0 if document.pinned_until is None else document.pinned_until - time.time()

        def take(core: EngineCore) -> None:
            self._extra_of(core, document)
            self._worker.add(core, document)
            if left_s > 0:
                self._worker.pin(core, document, left_s, must_have_room=False)

        try:
            if not is_of_tokenizer:
                await self._tokenize_again(document)
            await self._llm.ask(take)
        except (ValueError, TemplateError) as error:
            self._damaged[file_name(document.tenant, document.id)] = f"{error}; serve it as it was, or put it again"
        else:
            self._documents[document.tenant, document.id] = document

    async def _tokenize_again(self, document: Document) -> None:
        if document.text is None:
            raise ValueError("its token ids are another tokenizer's")
        draft = Draft(document.text, None, document.form, document.system, document.lora, document.cache_salt)
        limit = self._llm.tokenizers.limit(self._longest(None))
        _, token_ids = await self._llm.with_tokenizer(lambda tokenizer: tokens_of(draft, tokenizer, limit))
        document.token_ids = np.array(token_ids, np.int32)
        document.was_ready = False
        self._check_length(document)

    def _check_length(self, document: Document, most_tokens: int | None = None) -> None:
        longest = self._longest(most_tokens)
        if document.num_tokens > longest:
            raise TooManyTokens(document.num_tokens, longest)
        if not document.num_tokens:
            raise ValueError("document of 0 tokens; give it one at least")

    def _longest(self, most_tokens: int | None) -> int:
        """Tokens that a document may have."""
        longest = self._llm.longest_request - 2  # a question and an answer of one token each
        return longest if most_tokens is None else min(longest, most_tokens)

    async def _set_pin(self, document: Document, until: float | None) -> None:
        before, document.pinned_until = document.pinned_until, until
        try:
            await self._write(document)
        except OSError:
            document.pinned_until = before
            raise

    def _became_ready(self, document: Document) -> None:
        if self._is_closed:
            return
        document.was_ready = True
        self._begin(document.tenant, lambda: self._write_if_there(document))

    async def _write_if_there(self, document: Document) -> None:
        if self.find(document.tenant, document.id) is document:
            try:
                await self._write(document)
            except OSError as error:  # all that is lost: after a restart it is looked for, and computed, once more
                log.warning("documents: one that is ready could not be written: %s", error)

    async def _write(self, document: Document) -> None:
        if (folder := self._folder) is not None:
            await self._on_disk(lambda: folder.write(document))

    async def _on_disk(self, work: Callable[[], _T]) -> _T:
        result: _T = await call_in_executor(guarded(work), executor=self._disk_thread)
        return result


def documents_path(config: Config) -> Path | None:
    """The folder of documents: as configured, else beside the disk tier's, else none."""
    if config.documents.path is not None:
        return Path(config.documents.path)
    if config.disk is None:
        return None
    store = Path(config.disk.path)
    return store.with_name(f"{store.name}-documents")


def _residences(worker: DocumentWorker, documents: Sequence[Document], core: EngineCore) -> list[Residence]:
    return [worker.residence(core, document) for document in documents]
