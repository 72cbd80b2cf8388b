"""Documents: the documents of all tenants, computed in the background, kept warm, and restored after a restart."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from jinja2.exceptions import TemplateError

from kvtier.engine.async_llm import AsyncLLM
from kvtier.engine.config import Config
from kvtier.engine.text.min_tokens import TooManyTokens
from kvtier.server.documents.document import MAX_PINNED_S, Document, check_id
from kvtier.server.documents.draft import Draft, tokenizer_digest, tokens_of
from kvtier.server.documents.file import Damaged, file_name, tenant_prefix
from kvtier.server.documents.folder_thread import DocumentFiles, FolderThread, MemoryFiles
from kvtier.server.documents.kept_prefixes import Keeping, MarkedPrompt
from kvtier.server.documents.worker import DocumentState, DocumentWorker, Status
from kvtier.tiers.naming.tier import Tier

log = logging.getLogger(__name__)

_NUM_AT_ONCE = 8  # documents per query to the engine's thread, which takes steps between queries

_T = TypeVar("_T")


class TooManyDocuments(Exception):
    """Error raised when a tenant already has its maximum number of documents."""


class Documents:
    """Documents by tenant and id; a tenant can reach only its own. Owned by the event loop.

    With a folder, each change is on disk before the call returns. Without a folder, documents are lost when the process
    ends. A change runs to completion even if its caller is cancelled, so that the folder, this object and the engine's
    thread agree.
    """

    def __init__(self, llm: AsyncLLM, worker: DocumentWorker, folder: DocumentFiles, max_per_tenant: int) -> None:
        """Create an instance without documents, see `open`. Only the engine's thread of *llm* calls *worker*."""
        self._llm = llm
        self._worker = worker
        self._folder = folder
        self._max_per_tenant = max_per_tenant
        self._documents: dict[tuple[str | None, str], Document] = {}
        self._damaged: dict[str, str] = {}  # reason by file name
        # One change at a time per tenant, so that disk and memory agree. Tenants do not wait for each other.
        self._changing: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._changes: set[asyncio.Task[object]] = set()  # running, or waiting for their turn
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(
        cls, llm: AsyncLLM, config: Config, salt_of: Callable[[Document], str | None], num_tenants: int
    ) -> Self:
        """Open the folder of *config*, restore its documents and pins, and queue documents that were never computed.

        *salt_of* returns the cache_salt with which a document's blocks are named. *num_tenants* tenants share the
        memory for pins.

        Raises:
            OSError: The folder cannot be used.
            FolderInUse: Another process has the folder open.
        """
        async with AsyncExitStack() as undo:
            folder = await _open_folder(llm, config)
            undo.push_async_callback(folder.close)
            worker = await llm.add_attendant(lambda core: DocumentWorker(core, salt_of, num_tenants))
            undo.callback(llm.remove_attendant, worker)  # otherwise blocks would stay pinned without an owner
            documents = cls(llm, worker, folder, config.documents.max_per_tenant)
            undo.callback(documents._stop)
            await documents._read()
            undo.pop_all()
        return documents

    @property
    def are_kept(self) -> bool:
        """Whether documents outlive the process."""
        return self._folder.is_kept

    def of(self, tenant: str | None) -> list[Document]:
        """Return all documents of the tenant, oldest first."""
        found = [document for (owner, _), document in self._documents.items() if owner == tenant]
        return sorted(found, key=lambda document: document.created_at)

    def find(self, tenant: str | None, document_id: str) -> Document | None:
        """Return the tenant's document with this id; None if there is none."""
        return self._documents.get((tenant, document_id))

    def damaged_files(self, tenant: str | None) -> dict[str, str]:
        """Return the reasons why files of the tenant could not be read, by file name."""
        prefix = tenant_prefix(tenant)
        return {name: why for name, why in self._damaged.items() if name.startswith(prefix)}

    def damage_reason(self, tenant: str | None, document_id: str) -> str | None:
        """Return why the document's file could not be read; None if it was read or does not exist."""
        return self._damaged.get(file_name(tenant, document_id))

    async def put(
        self, tenant: str | None, document_id: str, draft: Draft, max_tokens: int | None = None
    ) -> tuple[Document, bool]:
        """Put a document and queue its computation; return the document, and whether it is new.

        A document with the same id and other content is replaced. A call that is cancelled during tokenization has no
        effect. A call that is cancelled later still completes.

        Raises:
            ValueError: The id, the text, the token ids or the adapter is not valid here.
            TemplateError: The chat template rejects the document (jinja2's error).
            TooManyDocuments: The tenant already has its maximum number of documents.
            OSError: The document cannot be written to disk; nothing has changed.
        """
        check_id(document_id)
        limit = self._llm.tokenizers.limit(self._longest(max_tokens))
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
        self._check_length(document, max_tokens)
        await self._ask(lambda worker: worker.extra_of(document))  # raises ValueError if its adapter is not configured
        return await self._make_change(tenant, lambda: self._put(document))

    async def residence(self, document: Document) -> DocumentState:
        """Return the document's status, and how much of it each tier has now."""
        (residence,) = await self.residences([document])
        return residence

    async def residences(self, documents: Sequence[Document]) -> list[DocumentState]:
        """Return the `residence` of several documents. It is not one snapshot, because the engine steps in between."""
        found: list[DocumentState] = []
        for start in range(0, len(documents), _NUM_AT_ONCE):
            some = documents[start : start + _NUM_AT_ONCE]
            found += await self._ask(partial(_residences, some))
        return found

    async def warm(self, document: Document, tier: Tier) -> None:
        """Start to load the document into *tier*; raise NoRoomToPin if host memory has no room."""
        await self._ask(lambda worker: worker.warm(document, tier))

    async def pin(self, document: Document, ttl_s: float) -> None:
        """Keep the document in host memory for *ttl_s* seconds from now, also across restarts.

        Raises:
            NoRoomToPin: The tenant's share of host memory has no room.
            OSError: The pin cannot be written to disk; an earlier pin stays as it was.
        """
        await self._make_change(document.tenant, lambda: self._pin(document, min(ttl_s, MAX_PINNED_S)))

    async def unpin(self, document: Document) -> None:
        """End the document's pin; raise OSError, and keep the pin, if the change cannot be written to disk."""
        await self._make_change(document.tenant, lambda: self._unpin(document))

    async def pin_prompt(
        self, tenant: str | None, token_ids: Sequence[int], lora: str | None, cache_salt: str | None, ttl_s: float
    ) -> bool:
        """Pin the cached part of a prompt in host memory for *ttl_s* seconds.

        Returns:
            False if the tenant's share has no room, or if no block of the prompt can be pinned.
        """
        return await self._ask(lambda worker: worker.pin_prompt(tenant, token_ids, lora, cache_salt, ttl_s))

    async def keep_prefixes(self, prompt: MarkedPrompt) -> Keeping:
        """Pin the cached part of a prompt up to its breakpoints, see `PinnedPrefixes.keep`."""
        return await self._ask(lambda worker: worker.prefixes.keep(prompt))

    async def read_prefixes(self, prompt: MarkedPrompt) -> Keeping:
        """Return the part of a prompt that is kept already. The call counts as a read of that part."""
        return await self._ask(lambda worker: worker.prefixes.read(prompt))

    def share_among(self, num_tenants: int) -> None:
        """Divide the memory for pins among *num_tenants* tenants, from the engine's next step on.

        Pins of a tenant beyond its new share stay until they end or are renewed.
        """
        self._llm.tell(lambda _: self._worker.share_among(num_tenants))

    async def delete(self, tenant: str | None, document_id: str) -> bool:
        """Delete a document, or its damaged file; return False if there is neither.

        The document's blocks stay cached until they are evicted. Raises OSError if the file cannot be removed; the
        document then still exists.
        """
        return await self._make_change(tenant, lambda: self._delete(tenant, document_id))

    async def close(self) -> None:
        """Wait until all changes are written, and close the folder, so that another process can open it.

        The engine keeps the pins until the engine ends. If the caller is cancelled, closing continues, and a second
        call waits for it.
        """
        self._stop()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    def _stop(self) -> None:
        """Ignore notifications of ready documents from now on."""
        self._is_closed = True

    async def _ask(self, question: Callable[[DocumentWorker], _T]) -> _T:
        """Call *question* in the engine's thread, which owns the worker, and return its result."""
        return await self._llm.ask(lambda _: question(self._worker))

    async def _close(self) -> None:
        while self._changes:
            await asyncio.wait(self._changes)
        await self._folder.close()

    async def _make_change(self, tenant: str | None, change: Callable[[], Coroutine[object, object, _T]]) -> _T:
        """Run *change* after the tenant's earlier changes, even if the caller is cancelled, and return its result."""
        return await asyncio.shield(self._start_change(tenant, change))

    def _start_change(
        self, tenant: str | None, change: Callable[[], Coroutine[object, object, _T]]
    ) -> "asyncio.Task[_T]":
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
        if before is not None and before.has_content_of(document):
            if (await self.residence(before)).status in (Status.FAILED, Status.EVICTED):
                await self.warm(before, Tier.DEVICE)
            return before, False
        if before is None and len(self.of(tenant)) >= self._max_per_tenant:
            raise TooManyDocuments(f"this tenant already has {self._max_per_tenant} documents, its maximum; delete one")
        await self._folder.write(document)
        if before is not None:
            await self._ask(lambda worker: worker.drop(before))
        self._documents[tenant, document.id] = document
        self._damaged.pop(file_name(tenant, document.id), None)
        await self._ask(lambda worker: worker.add(document, partial(self._tell_ready, document)))
        return document, before is None

    async def _pin(self, document: Document, ttl_s: float) -> None:
        await self._ask(lambda worker: worker.pin(document, ttl_s))
        try:
            await self._set_pin(document, time.time() + ttl_s)
        except OSError:
            await self._ask(lambda worker: worker.unpin(document, _pinned_s(document)))  # restore the earlier end
            raise

    async def _unpin(self, document: Document) -> None:
        if document.pinned_until is not None:
            await self._set_pin(document, None)
            await self._ask(lambda worker: worker.unpin(document))

    async def _delete(self, tenant: str | None, document_id: str) -> bool:
        document, name = self.find(tenant, document_id), file_name(tenant, document_id)
        if document is None and name not in self._damaged:
            return False
        await self._folder.remove(name)
        self._damaged.pop(name, None)
        if document is not None:
            del self._documents[tenant, document_id]
            await self._ask(lambda worker: worker.drop(document))
        return True

    async def _read(self) -> None:
        """Read the folder's documents, and record the damaged files."""
        known: list[tuple[Document, bool]] = []
        for file, outcome in await self._folder.read_all():
            if isinstance(outcome, Damaged):
                self._damaged[file.name] = str(outcome)
                log.warning("documents: skipped the file %s: %s", file, outcome)
            else:
                known.append(outcome)
        for document, is_of_tokenizer in sorted(known, key=lambda pair: pair[0].created_at):
            await self._take_in(document, is_of_tokenizer)

    async def _take_in(self, document: Document, is_of_tokenizer: bool) -> None:
        left_s = _pinned_s(document)

        def take(worker: DocumentWorker) -> None:
            worker.extra_of(document)
            worker.add(document, partial(self._tell_ready, document))
            if left_s > 0:
                worker.pin(document, left_s, must_have_room=False)

        try:
            if not is_of_tokenizer:
                await self._tokenize_again(document)
            await self._ask(take)
        except (ValueError, TemplateError) as error:
            self._damaged[file_name(document.tenant, document.id)] = (
                f"{error}; restore the server's previous settings, or put the document again"
            )
        else:
            self._documents[document.tenant, document.id] = document

    async def _tokenize_again(self, document: Document) -> None:
        if document.text is None:
            raise ValueError("its token ids were made by another tokenizer")
        draft = Draft(document.text, None, document.form, document.system, document.lora, document.cache_salt)
        limit = self._llm.tokenizers.limit(self._longest(None))
        _, token_ids = await self._llm.with_tokenizer(lambda tokenizer: tokens_of(draft, tokenizer, limit))
        document.token_ids = np.array(token_ids, np.int32)
        document.was_ready = False
        self._check_length(document)

    def _check_length(self, document: Document, max_tokens: int | None = None) -> None:
        longest = self._longest(max_tokens)
        if document.num_tokens > longest:
            raise TooManyTokens(document.num_tokens, longest)
        if not document.num_tokens:
            raise ValueError("the document has 0 tokens; give it at least one")

    def _longest(self, max_tokens: int | None) -> int:
        """Return the maximum number of tokens of a document, at most *max_tokens* unless that is None."""
        longest = self._llm.longest_request - 2  # room for a question and an answer of one token each
        return longest if max_tokens is None else min(longest, max_tokens)

    async def _set_pin(self, document: Document, until: float | None) -> None:
        before, document.pinned_until = document.pinned_until, until
        try:
            await self._folder.write(document)
        except OSError:
            document.pinned_until = before
            raise

    def _tell_ready(self, document: Document) -> None:
        """Notify the event loop, from the engine's thread, that the document has been computed."""
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._on_ready, document)

    def _on_ready(self, document: Document) -> None:
        if self._is_closed:
            return
        document.was_ready = True
        self._start_change(document.tenant, lambda: self._write_if_there(document))

    async def _write_if_there(self, document: Document) -> None:
        if self.find(document.tenant, document.id) is document:
            try:
                await self._folder.write(document)
            except OSError as error:  # the only loss: after a restart the document is computed again
                log.warning("documents: cannot write the file of a document that has become ready: %s", error)


def _pinned_s(document: Document) -> float:
    """Return how many more seconds the document is pinned; 0 if it is not."""
    return 0.0 if document.pinned_until is None else max(0.0, document.pinned_until - time.time())


async def _open_folder(llm: AsyncLLM, config: Config) -> DocumentFiles:
    if (path := documents_path(config)) is None:
        log.info("documents are lost when this process ends; %s", persistence_advice(config.sidecar))
        return MemoryFiles()
    cipher = await llm.ask(lambda core: core.cipher)
    tokenizer = await llm.with_tokenizer(tokenizer_digest)
    return await FolderThread.open(path, cipher, tokenizer)


def documents_path(config: Config) -> Path | None:
    """Return the folder of documents: `documents.path`, or else a folder next to the one of [disk].

    Return None if neither is configured. A sidecar has [disk] instead of the engine, and this process may not be
    allowed to write to the sidecar's folder.
    """
    if config.documents.path is not None:
        return Path(config.documents.path)
    if config.disk is None:
        return None
    store = Path(config.disk.path)
    return store.with_name(f"{store.name}-documents")


def persistence_advice(sidecar: str | None) -> str:
    """Return advice on how to keep documents after the process has ended."""
    return f"to keep them, set documents.path{' or configure [disk]' if sidecar is None else ''}"


def _residences(documents: Sequence[Document], worker: DocumentWorker) -> list[DocumentState]:
    return [worker.residence(document) for document in documents]
