"""Documents: all there are, of all tenants; computed in the background, kept warm, and there again after a restart."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from jinja2.exceptions import TemplateError

from kvtier.engine.async_llm import AsyncLLM
from kvtier.engine.config import Config
from kvtier.engine.documents.document import MOST_PINNED_S, Document, check_id
from kvtier.engine.documents.draft import Draft, tokenizer_digest, tokens_of
from kvtier.engine.documents.file import Damaged, file_name, tenant_prefix
from kvtier.engine.documents.folder_thread import FolderThread, Keeping, NoFolder
from kvtier.engine.documents.worker import DocumentWorker, Residence, Status
from kvtier.engine.text.least_tokens import TooManyTokens
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

    def __init__(self, llm: AsyncLLM, worker: DocumentWorker, folder: Keeping, most_per_tenant: int) -> None:
        """None yet. *worker* is `llm`'s, whose thread alone calls it. `open` makes one, and reads the *folder*."""
        self._llm = llm
        self._worker = worker
        self._folder = folder
        self._most_per_tenant = most_per_tenant
        self._documents: dict[tuple[str | None, str], Document] = {}
        self._damaged: dict[str, str] = {}  # files, and why
        # One change of a tenant's at a time: what is on disk and here are the same, and no tenant waits for another's.
        self._changing: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._changes: set[asyncio.Task[object]] = set()  # under way, or waiting for their turn
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(
        cls, llm: AsyncLLM, config: Config, salt_of: Callable[[Document], str | None], num_tenants: int
    ) -> Self:
        """Those that were there when the last process ended, with their pins. What was not computed yet is queued.

        *salt_of*: the cache_salt that a document's blocks are named with. *num_tenants* share what may be pinned.
        OSError if there is a folder and it cannot be used, FolderInUse if another process has it.
        """
        async with AsyncExitStack() as undo:
            folder = await _open_folder(llm, config)
            undo.push_async_callback(folder.close)
            worker = await llm.attend(lambda core: DocumentWorker(core, salt_of, num_tenants))
            undo.callback(llm.neglect, worker)  # or what was held for documents that nobody has would stay held
            documents = cls(llm, worker, folder, config.documents.max_per_tenant)
            undo.callback(documents._stop)
            await documents._read()
            undo.pop_all()
        return documents

    @property
    def are_kept(self) -> bool:
        """Whether they survive the process."""
        return self._folder.is_kept

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
        await self._ask(lambda worker: worker.extra_of(document))  # its adapter is there
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
            found += await self._ask(partial(_residences, some))
        return found

    async def warm(self, document: Document, tier: Tier) -> None:
        """Begin to bring it to the device or to host memory. NoRoomToPin."""
        await self._ask(lambda worker: worker.warm(document, tier))

    async def pin(self, document: Document, ttl_s: float) -> None:
        """Keep it in host memory for so long from now on, over restarts. NoRoomToPin; OSError if that cannot be
        written down, and then it is not pinned."""
        await self._whole(document.tenant, lambda: self._pin(document, min(ttl_s, MOST_PINNED_S)))

    async def unpin(self, document: Document) -> None:
        """Keep it no longer. OSError if that cannot be written down, and then it stays pinned."""
        await self._whole(document.tenant, lambda: self._unpin(document))

    async def pin_prompt(
        self, tenant: str | None, token_ids: Sequence[int], lora: str | None, cache_salt: str | None, ttl_s: float
    ) -> bool:
        """Keep what is cached of a tenant's prompt in host memory for so long; False if there is no room for that, or
        the prompt has no block that could be kept."""
        return await self._ask(lambda worker: worker.pin_prompt(tenant, token_ids, lora, cache_salt, ttl_s))

    def share_among(self, num_tenants: int) -> None:
        """So many tenants share what may be pinned, from the next step on. What more than a share is held stays until
        its time is over or it is renewed."""
        self._llm.tell(lambda _: self._worker.share_among(num_tenants))

    async def delete(self, tenant: str | None, document_id: str) -> bool:
        """Forget it, or its damaged file; False if there is neither. OSError, and it is still there, if its file cannot
        be removed. Its blocks stay cached until others need their room."""
        return await self._whole(tenant, lambda: self._delete(tenant, document_id))

    async def close(self) -> None:
        """Have all written, and let others open the folder. The engine has to run still, or to have ended; it keeps
        what it holds until it ends. Cancelled, closing goes on; again, it waits for the same."""
        self._stop()
        await asyncio.shield(self._closing)

    def _stop(self) -> None:
        """Note no more that documents have become ready."""
        self._is_closed = True

    async def _ask(self, question: Callable[[DocumentWorker], _T]) -> _T:
        """What *question* returns in the engine's thread, which owns the worker."""
        return await self._llm.ask(lambda _: question(self._worker))

    @cached_property
    def _closing(self) -> "asyncio.Task[None]":
        """Begins to close, once."""
        return asyncio.create_task(self._close())

    async def _close(self) -> None:
        while self._changes:
            await asyncio.wait(self._changes)
        await self._folder.close()

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
            await self._ask(lambda worker: worker.unpin(document, _pinned_s(document)))  # the earlier end
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
        """Take in what is in the folder."""
        known: list[tuple[Document, bool]] = []
        for file, outcome in await self._folder.read_all():
            if isinstance(outcome, Damaged):
                self._damaged[file.name] = str(outcome)
                log.warning("documents: %s is left out: %s", file, outcome)
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
            await self._folder.write(document)
        except OSError:
            document.pinned_until = before
            raise

    def _tell_ready(self, document: Document) -> None:
        """From the engine's thread: it has been computed."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._became_ready, document)

    def _became_ready(self, document: Document) -> None:
        if self._is_closed:
            return
        document.was_ready = True
        self._begin(document.tenant, lambda: self._write_if_there(document))

    async def _write_if_there(self, document: Document) -> None:
        if self.find(document.tenant, document.id) is document:
            try:
                await self._folder.write(document)
            except OSError as error:  # all that is lost: after a restart it is looked for, and computed, once more
                log.warning("documents: one that is ready could not be written: %s", error)


def _pinned_s(document: Document) -> float:
    """For how many seconds more the document is pinned; 0 if it is not."""
    return 0.0 if document.pinned_until is None else max(0.0, document.pinned_until - time.time())


async def _open_folder(llm: AsyncLLM, config: Config) -> Keeping:
    if (path := documents_path(config)) is None:
        log.info("documents last as long as this process; to keep them give [documents] a path, or have a [disk]")
        return NoFolder()
    cipher = await llm.ask(lambda core: core.cipher)
    tokenizer = await llm.with_tokenizer(tokenizer_digest)
    return await FolderThread.open(path, cipher, tokenizer)


def documents_path(config: Config) -> Path | None:
    """The folder of documents: as configured, else beside the disk tier's, else none."""
    if config.documents.path is not None:
        return Path(config.documents.path)
    if config.disk is None:
        return None
    store = Path(config.disk.path)
    return store.with_name(f"{store.name}-documents")


def _residences(documents: Sequence[Document], worker: DocumentWorker) -> list[Residence]:
    return [worker.residence(document) for document in documents]
