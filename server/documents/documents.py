"""Documents: the stored documents of all tenants, computed in the background, and restored after a restart."""

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

from kvtier.engine.async_engine import AsyncEngine
from kvtier.engine.config import Config
from kvtier.engine.text.min_tokens import TooManyTokens
from kvtier.server.documents.document import MAX_PINNED_S, Document, check_id
from kvtier.server.documents.draft import Draft, tokenizer_digest, tokens_of
from kvtier.server.documents.file import Damaged, file_name, tenant_prefix
from kvtier.server.documents.folder_thread import DocumentFiles, FolderThread, MemoryFiles
from kvtier.server.documents.kept_prefixes import Keeping, MarkedPrompt
from kvtier.server.documents.worker import DocumentState, DocumentWorker, Status
from kvtier.tiers.naming.block_hash import MultimodalItem
from kvtier.tiers.naming.tier import Tier

log = logging.getLogger(__name__)

_NUM_AT_ONCE = 8  # documents per query to the engine's thread, which takes steps between queries

_T = TypeVar("_T")


class TooManyDocuments(Exception):
    """Error raised when a tenant already has its maximum number of documents."""


class Documents:
    """The documents that clients have stored, by tenant and id. Owned by the event loop.

    If a folder is configured, each change is on disk before the call returns. Otherwise, documents are lost when the
    process ends. A change runs to completion even if its caller is cancelled, so that the folder, this object and the
    engine's thread have the same documents.
    """

    def __init__(self, llm: AsyncEngine, worker: DocumentWorker, folder: DocumentFiles, max_per_tenant: int) -> None:
        """Create an instance without documents; `open` restores them. Only the thread of *llm* may use *worker*."""
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
        cls, llm: AsyncEngine, config: Config, salt_of: Callable[[Document], str | None], num_tenants: int
    ) -> Self:
        """Open the folder of *config*, restore its documents and pins, and queue documents that were never computed.

        Args:
            llm: Engine that computes the documents.
            config: Configuration with the folder.
            salt_of: Function that returns the cache_salt with which a document's blocks are hashed.
            num_tenants: Number of tenants that share the memory for pins.

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
        """True if documents are stored on disk, so that they survive a restart."""
        return self._folder.is_kept

    def of(self, tenant: str | None) -> list[Document]:
        """Return all documents of the tenant, oldest first."""
        found = [document for (owner, _), document in self._documents.items() if owner == tenant]
        return sorted(found, key=lambda document: document.created_at)

    def find(self, tenant: str | None, document_id: str) -> Document | None:
        """Return the tenant's document with this id; None if there is none."""
        return self._documents.get((tenant, document_id))

    def damaged_files(self, tenant: str | None) -> dict[str, str]:
        """Return the tenant's document files that could not be read: the reason by file name."""
        prefix = tenant_prefix(tenant)
        return {name: why for name, why in self._damaged.items() if name.startswith(prefix)}

    def damage_reason(self, tenant: str | None, document_id: str) -> str | None:
        """Return why a document's file could not be read; None if it was read or does not exist."""
        return self._damaged.get(file_name(tenant, document_id))

    async def put(
        self, tenant: str | None, document_id: str, draft: Draft, max_tokens: int | None = None
    ) -> tuple[Document, bool]:
        """Store a document and queue the computation of its KV; return the document, and whether its id is new.

        A document with the same id but other content is replaced. A call that is cancelled during tokenization has no
        effect. A call that is cancelled later still completes.

        Raises:
            ValueError: The id, the text, the token ids or the adapter is not valid.
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
        """Return the document's status, and the number of its tokens in each tier."""
        (residence,) = await self.residences([document])
        return residence

    async def residences(self, documents: Sequence[Document]) -> list[DocumentState]:
        """Return the `residence` of each document, at slightly different times if there are many documents."""
        found: list[DocumentState] = []
        for start in range(0, len(documents), _NUM_AT_ONCE):
            some = documents[start : start + _NUM_AT_ONCE]
            found += await self._ask(partial(_residences, some))
        return found

    async def warm(self, document: Document, tier: Tier) -> None:
        """Start to load the document into *tier*; raise NoRoomToPin if it does not fit in host memory."""
        await self._ask(lambda worker: worker.warm(document, tier))

    async def pin(self, document: Document, ttl_s: float) -> None:
        """Keep the document in host memory for *ttl_s* seconds from now. The pin survives a restart.

        Raises:
            NoRoomToPin: The tenant's share of host memory has no room for the document.
            OSError: The pin cannot be written to disk; an earlier pin stays as it was.
        """
        await self._make_change(document.tenant, lambda: self._pin(document, min(ttl_s, MAX_PINNED_S)))

    async def unpin(self, document: Document) -> None:
        """End the document's pin. If the change cannot be written to disk, raise OSError and keep the pin."""
        await self._make_change(document.tenant, lambda: self._unpin(document))

    async def pin_prompt(
        self,
        tenant: str | None,
        token_ids: Sequence[int],
        lora: str | None,
        cache_salt: str | None,
        ttl_s: float,
        items: tuple[MultimodalItem, ...] = (),
    ) -> bool:
        """Pin the cached part of a prompt in host memory for *ttl_s* seconds. *items* are its images.

        Returns:
            Whether the prompt is pinned: False if the tenant's share has no room, or if no block can be pinned.
        """
        return await self._ask(lambda worker: worker.pin_prompt(tenant, token_ids, lora, cache_salt, ttl_s, items))

    async def keep_prefixes(self, prompt: MarkedPrompt) -> Keeping:
        """Pin the prefixes of a prompt that `cache_control` marks; see `PinnedPrefixes.keep`."""
        return await self._ask(lambda worker: worker.prefixes.keep(prompt))

    async def read_prefixes(self, prompt: MarkedPrompt) -> Keeping:
        """Return which prefixes of a prompt are pinned already, and let their ttl start again."""
        return await self._ask(lambda worker: worker.prefixes.read(prompt))

    def share_among(self, num_tenants: int) -> None:
        """Divide the memory for pins among *num_tenants* tenants, from the engine's next step on.

        If a tenant's pins exceed its new share, they stay until they end or are renewed.
        """
        self._llm.tell(lambda _: self._worker.share_among(num_tenants))

    async def delete(self, tenant: str | None, document_id: str) -> bool:
        """Delete a document, or the file of a damaged document; return False if there is neither.

        The document's blocks stay cached until they are evicted. If the file cannot be removed, OSError is raised, and
        the document still exists.
        """
        return await self._make_change(tenant, lambda: self._delete(tenant, document_id))

    async def close(self) -> None:
        """Wait until all changes are written, and close the folder, so that another process can open it.

        Pinned blocks stay pinned until the engine ends. If the caller is cancelled, closing continues in the
        background. A second call waits until closing is complete.
        """
        self._stop()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    def _stop(self) -> None:
        """Stop recording which documents the engine's thread has computed."""
        self._is_closed = True

    async def _ask(self, question: Callable[[DocumentWorker], _T]) -> _T:
        """Call *question* in the engine's thread, which owns the worker, and return its result."""
        return await self._llm.ask(lambda _: question(self._worker))

    async def _close(self) -> None:
        while self._changes:
            await asyncio.wait(self._changes)
        await self._folder.close()

    async def _make_change(self, tenant: str | None, change: Callable[[], Coroutine[object, object, _T]]) -> _T:
        """Run *change* after the tenant's earlier changes, even if the caller is cancelled; return its result."""
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
        """Restore the documents in the folder, and record the files that cannot be read."""
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
            raise ValueError("the document's token ids were made by another tokenizer")
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
        """Return the maximum length of a document in tokens: the engine's limit, or *max_tokens* if that is lower."""
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
        """Notify the event loop that a document has been computed. The engine's thread calls this."""
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
                log.warning("documents: cannot mark a document on disk as computed; a restart recomputes it: %s", error)


def _pinned_s(document: Document) -> float:
    """Return the remaining seconds of the document's pin; 0 if it is not pinned."""
    return 0.0 if document.pinned_until is None else max(0.0, document.pinned_until - time.time())


async def _open_folder(llm: AsyncEngine, config: Config) -> DocumentFiles:
    if (path := documents_path(config)) is None:
        log.info("documents are lost when this process ends; %s", persistence_advice(config.sidecar))
        return MemoryFiles()
    cipher = await llm.ask(lambda core: core.cipher)
    tokenizer = await llm.with_tokenizer(tokenizer_digest)
    return await FolderThread.open(path, cipher, tokenizer)


def documents_path(config: Config) -> Path | None:
    """Return the folder in which documents are stored; None if documents are not stored.

    It is `documents.path`, or by default a folder next to `disk.path`. With a sidecar, [disk] is in the
    sidecar's configuration, so only `documents.path` counts.
    """
    if config.documents.path is not None:
        return Path(config.documents.path)
    if config.disk is None:
        return None
    store = Path(config.disk.path)
    return store.with_name(f"{store.name}-documents")


def persistence_advice(sidecar: str | None) -> str:
    """Return a text that says which settings keep documents when the process ends."""
    return f"to keep them, set documents.path{' or configure [disk]' if sidecar is None else ''}"


def _residences(documents: Sequence[Document], worker: DocumentWorker) -> list[DocumentState]:
    return [worker.residence(document) for document in documents]
