"""Documents in the engine are computed behind all requests, kept warm, and restored after a restart."""

import asyncio
import os
import random
import shutil
import stat
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from cancelling import cancelled_at
from document_tables import BLOCK_SIZE, CHUNK, tables
from small_models import VOCAB, build, byte_tokenizer, plain_greedy
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from waiting import wait_for

from kvtier import SamplingParams
from kvtier.engine.async_engine import AsyncEngine
from kvtier.engine.build_core import build_core
from kvtier.engine.config import as_config
from kvtier.engine.core import EngineCore
from kvtier.engine.scheduling.request import Completion
from kvtier.engine.scheduling.timed_pins import TimedPins
from kvtier.engine.text.chat_prefix import chat_prefix, chat_token_ids
from kvtier.engine.text.min_tokens import MinTokens, PromptLimit
from kvtier.server.documents.document import Document, Form
from kvtier.server.documents.documents import Documents, TooManyDocuments
from kvtier.server.documents.draft import Draft
from kvtier.server.documents.file import SUFFIX, Damaged, DocumentFolder, read_all
from kvtier.server.documents.file import file_name as file_of
from kvtier.server.documents.pins import NoRoomToPin
from kvtier.server.documents.prefills import PATIENCE_S, DocumentPrefills
from kvtier.server.documents.worker import DocumentState, Status
from kvtier.store.owner_lock import FolderInUse
from kvtier.tiers.naming.block_hash import ExtraKeys
from kvtier.tiers.naming.tier import Tier

DEADLINE_S = 120.0  # for what takes milliseconds: reached only when a test fails
TEMPLATE = "<s>{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def chat_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def salt_of(document: Document) -> str | None:
    return document.cache_salt


def held_bytes(core: EngineCore) -> int:
    """Bytes of host memory that pins take."""
    return core.cache.pins.max_bytes - core.cache.pins.free_bytes


def no_extra(_: Document) -> ExtraKeys:
    return ExtraKeys()


def with_pins_by(clock: Callable[[], float]) -> Callable[[EngineCore], None]:
    """Make an engine's pins end by *clock*."""

    def replace(core: EngineCore) -> None:
        core.pins = TimedPins(core.cache, clock)

    return replace


def remove(folder: Path) -> None:
    """Remove a folder in which files may be written meanwhile."""

    def is_gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    wait_for(is_gone)


def play(
    model: PreTrainedModel,
    config: dict,
    story: Callable[[AsyncEngine, Documents], Coroutine[object, object, None]],
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> None:
    """Run *story* with an engine and its documents, as one process would."""

    async def whole() -> None:
        async with AsyncEngine(model, config, tokenizer or chat_tokenizer()) as llm:
            documents = await Documents.open(llm, llm.config, salt_of, num_tenants=1)
            await story(llm, documents)
            await llm.ask(lambda core: core.cache.check())
            await documents.close()

    asyncio.run(asyncio.wait_for(whole(), DEADLINE_S))


def text_of(seed: int, num_tokens: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz .") for _ in range(num_tokens))


def draft(text: str | None = None, form: Form | None = None, **others: object) -> Draft:
    values = {"token_ids": None, "system": None, "lora": None, "cache_salt": None, **others}
    return Draft(text, form=form, **values)


def tokens_draft(seed: int, num_tokens: int) -> Draft:
    rng = random.Random(seed)
    return draft(token_ids=[rng.randrange(VOCAB) for _ in range(num_tokens)])


async def come_true(condition: Callable[[], Awaitable[bool]]) -> None:
    until = time.monotonic() + DEADLINE_S / 2
    while not await condition():
        assert time.monotonic() < until, "it never came true"
        await asyncio.sleep(0.005)


async def put(documents: Documents, document_id: str, what: Draft, tenant: str | None = None) -> Document:
    """Put a document and wait until it is ready."""
    document, _ = await documents.put(tenant, document_id, what)
    await until(documents, document, lambda it: it.status not in (Status.QUEUED, Status.PREFILLING))
    assert (await documents.residence(document)).status is Status.READY
    return document


async def until(documents: Documents, document: Document, condition: Callable[[DocumentState], bool]) -> DocumentState:
    async def is_so() -> bool:
        return condition(await documents.residence(document))

    await come_true(is_so)
    return await documents.residence(document)


async def ask(llm: AsyncEngine, prompt: list[int], cache_salt: str | None = None) -> Completion:
    async for piece in llm.generate(prompt, SamplingParams(max_tokens=6, ignore_eos=True), cache_salt=cache_salt):
        if piece.completion is not None:
            return piece.completion
    raise AssertionError("no completion")


async def flush_device(llm: AsyncEngine, num_prompts: int = 4, num_tokens: int = 2500) -> None:
    """Compute so many other prompts that no earlier block is left on the device."""
    rng = random.Random(num_prompts)
    for _ in range(num_prompts):
        await ask(llm, [rng.randrange(VOCAB) for _ in range(num_tokens)])


# --- computing documents


def test_a_document_is_computed_and_a_prompt_that_begins_with_it_computes_only_the_rest(model: PreTrainedModel) -> None:
    async def story(llm: AsyncEngine, documents: Documents) -> None:
        document = await put(documents, "report", tokens_draft(1, 1000))
        prompt = [*document.token_ids.tolist(), 7, 8, 9]

        done = await ask(llm, prompt)

        assert done.tokens.recomputed <= 3
        assert done.token_ids == plain_greedy(model, prompt, 6)
        where = await documents.residence(document)
        assert where.tokens == {"device": 992, "host": 0, "disk": 0, "remote": 0, "nowhere": 8}
        assert where.num_bytes["device"] == 992 * 1024
        assert where.num_computed == 1000
        assert where.load_s == 0

    play(model, tables(), story)


@pytest.mark.parametrize("system", [None, "You are brief."])
def test_a_chat_that_begins_with_the_document_finds_all_of_it(model: PreTrainedModel, system: str | None) -> None:
    tokenizer, text = chat_tokenizer(), text_of(2, 1000)

    async def story(llm: AsyncEngine, documents: Documents) -> None:
        document = await put(documents, "report", draft(text, system=system))
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": f"{text}\nWho wrote it?"})
        written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(written)["input_ids"]

        done = await ask(llm, prompt)

        assert document.form is Form.CHAT
        assert written.startswith(tokenizer.decode(document.token_ids))
        assert document.num_tokens == len(written.partition("Who")[0])
        assert done.tokens.recomputed <= len(prompt) - document.num_tokens
        assert done.token_ids == plain_greedy(model, prompt, 6)

    play(model, tables(), story, tokenizer)


def test_with_tokens_of_many_characters_nearly_all_of_a_document_is_common_to_its_questions() -> None:
    """A token may reach from the end of the document into the question."""
    words = ["the report", "of", "the year", "before", "last", "says", "who", "wrote it.", "\n\n\n", "what? 7.", ":\n"]
    rng = random.Random(5)
    sentences = [" ".join(rng.choices(words, k=30)) for _ in range(300)]
    trained = Tokenizer(BPE())
    trained.decoder = ByteLevelDecoder()
    trained.train_from_iterator(sentences, BpeTrainer(vocab_size=800, initial_alphabet=ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained)
    tokenizer.chat_template = TEMPLATE
    lost = []
    for end in ("", ".", "\n", "\n\n", " the", ":", "4"):
        text = " ".join(sentences[:5]) + end
        limit = PromptLimit(MinTokens(tokenizer), num_ids=len(tokenizer), max_tokens=1_000_000)
        prefix = chat_prefix(tokenizer, None, text, limit)
        for question in ("Who?", "what", "\n", "7", "", " it", ".", "…"):
            asked = chat_token_ids(tokenizer, None, f"{text}\n{question}", limit)
            same = [one == other for one, other in zip(prefix, asked, strict=False)]
            lost.append(len(prefix) - [*same, False].index(False))
            assert len(prefix) > 50

    assert min(lost) >= 0
    assert max(lost) <= 2


def test_without_a_chat_template_a_text_is_text(model: PreTrainedModel) -> None:
    async def story(_: AsyncEngine, documents: Documents) -> None:
        document = await put(documents, "report", draft(text_of(3, 100)))
        assert (document.form, document.num_tokens) == (Form.TEXT, 100)
        with pytest.raises(ValueError, match="chat template"):
            await documents.put(None, "other", draft("some", Form.CHAT))

    play(model, tables(), story, chat_tokenizer(None))


def test_one_document_at_a_time_is_computed_and_deleting_cancels(model: PreTrainedModel) -> None:
    async def story(llm: AsyncEngine, documents: Documents) -> None:
        first, is_new = await documents.put(None, "first", tokens_draft(1, 2500))
        second, _ = await documents.put(None, "second", tokens_draft(2, 2500))
        third, _ = await documents.put(None, "third", tokens_draft(3, 300))
        await until(documents, first, lambda it: it.status is Status.PREFILLING and 0 <= it.num_computed < 2500)
        others = [await documents.residence(document) for document in (second, third)]
        assert is_new
        assert [it.status for it in others] == [Status.QUEUED, Status.QUEUED]

        assert await documents.delete(None, "second")
        assert await documents.delete(None, "first")
        assert not await documents.delete(None, "first")

        await until(documents, third, lambda it: it.status is Status.READY)
        assert documents.of(None) == [third]
        assert not await llm.ask(lambda core: core.has_work)

    play(model, tables(), story)


def test_a_question_waits_for_one_step_of_a_document_at_most(model: PreTrainedModel) -> None:
    """The wait is counted in tokens of the document, from the question's arrival to its first token."""
    question, ended = [5] * 40, []
    token_ids = np.array(tokens_draft(1, 2500).token_ids, np.int32)
    document = Document("report", None, Form.TEXT, None, None, token_ids, None, None, created_at=0.0)
    with build_core(model, chat_tokenizer(), as_config(tables())) as core:
        prefills = DocumentPrefills(core, no_extra, lambda document, error: ended.append((document, error)))
        prefills.add(document)

        def step() -> None:
            core.step()
            prefills.tick()

        prefills.tick()
        while prefills.num_computed <= 200:
            step()
        before = prefills.num_computed
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        asked = core.add(question, sampling, ExtraKeys(), time.monotonic())
        while asked.finish_reason is None:
            step()
        after = prefills.num_computed
        while not ended:
            step()

    assert asked.generated == plain_greedy(model, question, 1)
    assert after - before <= CHUNK  # what a step computes of one prompt
    assert ended == [(document, None)]


def test_a_document_is_computed_although_questions_never_end(model: PreTrainedModel) -> None:
    """One question runs and one waits at any moment, so that a document of low priority alone never gets a turn."""
    now, ended, num_questions = 0.0, [], 0
    config = tables()
    config["scheduler"]["max_running"] = 1
    token_ids = np.array([3] * 200, np.int32)
    document = Document("report", None, Form.TEXT, None, None, token_ids, None, None, created_at=0.0)
    with build_core(model, chat_tokenizer(), as_config(config)) as core:
        prefills = DocumentPrefills(
            core, no_extra, lambda document, error: ended.append((document, error)), lambda: now
        )
        prefills.add(document)

        while not ended:
            assert now < 2 * PATIENCE_S, "a document starves"
            while core.num_waiting < 3:
                num_questions += 1
                sampling = SamplingParams(max_tokens=2, ignore_eos=True)
                core.add([num_questions % VOCAB] * 20, sampling, ExtraKeys(), time.monotonic())
            core.step()
            prefills.tick()
            now += 0.5

    assert ended == [(document, None)]
    assert now >= PATIENCE_S  # until then the document is behind all questions


def test_what_the_engine_does_not_take_has_failed_and_says_why(model: PreTrainedModel) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<new>"])  # for which the model has no row

    async def story(_: AsyncEngine, documents: Documents) -> None:
        document, _ = await documents.put(None, "report", draft(token_ids=[1, VOCAB]))
        where = await until(documents, document, lambda it: it.status is Status.FAILED)
        assert "the model knows 0 to 255" in (where.error or "")
        for what, why in (
            (draft(token_ids=[]), "the document has 0 tokens"),
            (tokens_draft(1, 200 * BLOCK_SIZE), "has at least 3200 tokens"),
            (draft(token_ids=[1, VOCAB + 1]), "token id 257: the tokenizer has 0 to 256"),
            (draft(token_ids=[1], form=Form.CHAT), "token ids cannot be a document for chats"),
            (draft("a", Form.TEXT, system="b"), "system"),
        ):
            with pytest.raises(ValueError, match=why):
                await documents.put(None, "other", what)
        for document_id in ("", ".", "..", "a/b", "a" * 129, "ä", "a\n"):
            with pytest.raises(ValueError, match="1 to 128"):
                await documents.put(None, document_id, tokens_draft(1, 10))

    play(model, tables(), story, tokenizer)


def test_putting_the_same_again_changes_nothing_and_something_else_replaces_it(model: PreTrainedModel) -> None:
    async def story(_: AsyncEngine, documents: Documents) -> None:
        first = await put(documents, "report", tokens_draft(1, 100))
        again, is_new = await documents.put(None, "report", tokens_draft(1, 100))
        assert (again, is_new) == (first, False)
        other, is_new = await documents.put(None, "report", tokens_draft(2, 100))
        assert not is_new
        assert documents.of(None) == [other]

    play(model, tables(), story)


def test_tenants_have_documents_of_their_own_and_not_too_many(model: PreTrainedModel) -> None:
    async def story(_: AsyncEngine, documents: Documents) -> None:
        document = await put(documents, "report", tokens_draft(1, 100), "ann")
        assert [documents.find(tenant, "report") for tenant in ("ann", "bob", None)] == [document, None, None]
        assert documents.of("bob") == []
        assert not await documents.delete("bob", "report")
        with pytest.raises(TooManyDocuments, match="delete one"):
            await documents.put("ann", "other", tokens_draft(2, 100))
        await put(documents, "other", tokens_draft(2, 100), "bob")

    play(model, {**tables(), "documents": {"max_per_tenant": 1}}, story)


# --- keeping documents warm


@pytest.mark.long
def test_a_pinned_document_stays_in_host_memory_whatever_is_asked_until_its_time_is_over(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    now = 0.0

    async def story(llm: AsyncEngine, documents: Documents) -> None:
        await llm.ask(with_pins_by(lambda: now))
        document = await put(documents, "report", tokens_draft(1, 1000))
        await documents.pin(document, 60.0)
        await until(documents, document, lambda it: it.is_held)
        await flush_device(llm)
        where = await documents.residence(document)
        assert (where.is_held, where.tokens["host"], where.tokens["nowhere"]) == (True, 992, 8)
        assert where.load_s is None  # nothing has been loaded yet
        assert where.compute_s is not None
        done = await ask(llm, [*document.token_ids.tolist(), 7, 8, 9])
        assert done.tokens.host == 992
        await flush_device(llm)
        assert (await documents.residence(document)).load_s is not None

        nonlocal now
        for later in (31.0, 59.0):  # renewed
            now = later
            await until(documents, document, lambda it: it.is_held)
            await llm.ask(lambda core: core.cache.check())
        now = 61.0
        await until(documents, document, lambda it: not it.is_held)

        async def is_given_back() -> bool:
            return await llm.ask(held_bytes) == 0

        await come_true(is_given_back)

    play(model, tables(tmp_path), story)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_a_document_of_a_model_with_windows_is_pinned_and_found(name: str) -> None:
    async def story(llm: AsyncEngine, documents: Documents) -> None:
        document = await put(documents, "report", tokens_draft(1, 1000))
        await documents.pin(document, 60.0)
        await until(documents, document, lambda it: it.is_held)
        await flush_device(llm)
        assert (await documents.residence(document)).status is Status.READY
        done = await ask(llm, prompt := [*document.token_ids.tolist(), 7, 8, 9])
        assert done.tokens.host == 992
        assert done.token_ids == plain_greedy(model, prompt, 6)

    model = build(name)
    play(model, tables(), story)


@pytest.mark.parametrize("field", ["text", "system", "lora", "cache_salt"])
def test_a_document_of_no_unicode_is_refused_before_anything_is_made_of_it(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is not valid Unicode"):
        draft(**{"text": "a", field: "a\udc00"})


def test_what_cannot_be_held_is_refused_and_unpinning_makes_room(model: PreTrainedModel) -> None:
    async def story(llm: AsyncEngine, documents: Documents) -> None:
        first = await put(documents, "first", tokens_draft(1, 1000))
        second = await put(documents, "second", tokens_draft(2, 1000))
        await documents.pin(first, 60.0)
        for change in (documents.pin(second, 60.0), documents.warm(second, Tier.HOST)):
            with pytest.raises(NoRoomToPin, match="unpin another"):
                await change
        assert second.pinned_until is None
        await documents.pin(first, 120.0)  # is held already

        await documents.unpin(first)
        await documents.unpin(first)
        await documents.pin(second, 60.0)

        await until(documents, second, lambda it: it.is_held)
        assert not (await documents.residence(first)).is_held

    play(model, tables(num_host_slots=130), story)


@pytest.mark.long
def test_warming_brings_a_document_from_disk_to_host_memory_or_to_the_device(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    async def story(llm: AsyncEngine, documents: Documents) -> None:
        document = await put(documents, "report", tokens_draft(1, 1000))
        await flush_device(llm, num_prompts=8)
        await until(documents, document, lambda it: it.tokens["disk"] == 992)

        await documents.warm(document, Tier.HOST)
        where = await until(documents, document, lambda it: not it.is_warming)
        assert where.tokens["host"] == 992
        assert await llm.ask(held_bytes) == 0

        await documents.warm(document, Tier.DEVICE)
        where = await until(documents, document, lambda it: it.tokens["device"] == 992)
        await until(documents, document, lambda it: it.status is Status.READY)

    play(model, tables(tmp_path, num_host_slots=200), story)


@pytest.mark.long
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DEVICE])
def test_what_was_evicted_says_so_and_is_computed_again_when_it_is_wanted(model: PreTrainedModel, tier: Tier) -> None:
    async def story(llm: AsyncEngine, documents: Documents) -> None:
        document = await put(documents, "report", tokens_draft(1, 1000))
        await flush_device(llm, num_prompts=6)
        where = await documents.residence(document)
        assert (where.status, where.num_computed) == (Status.EVICTED, 0)

        await documents.warm(document, tier)
        where = await until(documents, document, lambda it: it.status is Status.READY and not it.is_warming)

        assert where.tokens["nowhere"] == 8

    play(model, tables(num_host_slots=150), story)


# --- after a restart


@pytest.mark.long
def test_documents_and_pins_are_there_after_a_restart_and_questions_load(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    pinned, other, unfinished = tokens_draft(1, 1000), draft(text_of(2, 500)), tokens_draft(3, 2500)

    async def before(_: AsyncEngine, documents: Documents) -> None:
        document = await put(documents, "pinned", pinned)
        await documents.pin(document, 3600.0)
        await put(documents, "other", other, "ann")
        late, _ = await documents.put(None, "unfinished", unfinished)
        assert documents.are_kept
        await until(documents, late, lambda it: it.num_computed > 100)

    async def after(llm: AsyncEngine, documents: Documents) -> None:
        document = documents.find(None, "pinned")
        assert document is not None
        assert document.token_ids.tolist() == pinned.token_ids
        assert 0 < (document.pinned_until or 0) - time.time() <= 3600
        await until(documents, document, lambda it: it.is_held and it.status is Status.READY)
        done = await ask(llm, [*document.token_ids.tolist(), 7, 8])
        assert done.tokens.host + done.tokens.disk == 992

        ann = documents.find("ann", "other")
        assert ann is not None
        assert (ann.text, ann.form) == (other.text, Form.CHAT)
        late = documents.find(None, "unfinished")
        assert late is not None
        await until(documents, late, lambda it: it.status is Status.READY)

    play(model, tables(tmp_path), before)
    play(model, tables(tmp_path), after)
    files = list((tmp_path / "store-documents").iterdir())
    assert sum(file.suffix == SUFFIX for file in files) == 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "store-documents").stat().st_mode) == 0o700
    assert not any(word in file.name for file in files for word in ("pinned", "other", "ann"))


def test_a_deleted_document_and_an_ended_pin_do_not_come_back(model: PreTrainedModel, tmp_path: Path) -> None:
    async def before(_: AsyncEngine, documents: Documents) -> None:
        first = await put(documents, "first", tokens_draft(1, 100))
        await documents.pin(first, 3600.0)
        await documents.unpin(first)
        second = await put(documents, "second", tokens_draft(2, 100))
        await documents.pin(second, 0.001)
        await put(documents, "third", tokens_draft(3, 100))
        await documents.delete(None, "third")

    async def after(llm: AsyncEngine, documents: Documents) -> None:
        assert [document.id for document in documents.of(None)] == ["first", "second"]
        assert await llm.ask(held_bytes) == 0

    play(model, tables(tmp_path), before)
    play(model, tables(tmp_path), after)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_damaged_file_is_left_out_told_and_can_be_replaced(
    model: PreTrainedModel, tmp_path: Path, is_encrypted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    config = tables(tmp_path, **({"encryption_key_file": str(key)} if is_encrypted else {}))
    text, folder = "a secret of some length", tmp_path / "store-documents"

    async def before(_: AsyncEngine, documents: Documents) -> None:
        for name in ("flipped", "cut", "empty", "good"):
            await put(documents, name, draft(text), "ann")
        await put(documents, "exchanged", draft(text), "bob")

    async def after(_: AsyncEngine, documents: Documents) -> None:
        assert [document.id for document in documents.of("ann")] == ["good"]
        assert len(documents.damaged_files("ann")) == 3
        assert len(documents.damaged_files("bob")) == 1
        assert documents.damaged_files(None) == {}
        assert documents.damage_reason("ann", "cut") is not None
        await put(documents, "cut", draft(text), "ann")
        assert await documents.delete("ann", "flipped")
        assert len(documents.damaged_files("ann")) == 1

    play(model, config, before)
    files = {name: folder / file_of(tenant, name) for tenant, name in (("ann", "flipped"), ("ann", "cut"))}
    content = bytearray(files["flipped"].read_bytes())
    assert (text.encode() in content) != is_encrypted
    content[len(content) // 2] ^= 1
    files["flipped"].write_bytes(content)
    files["cut"].write_bytes(files["cut"].read_bytes()[:-3])
    (folder / file_of("ann", "empty")).write_bytes(b"")
    (folder / file_of("bob", "exchanged")).write_bytes((folder / file_of("ann", "good")).read_bytes())
    (folder / f"{file_of('ann', 'unfinished')}.new").write_bytes(b"abc")
    play(model, config, after)

    assert text not in caplog.text
    assert sorted(file.suffix for file in folder.iterdir()) == [".doc"] * 4 + [".lock"]


@pytest.mark.long
def test_files_of_another_key_are_damaged_and_stay(model: PreTrainedModel, tmp_path: Path) -> None:
    keys = [tmp_path / "one", tmp_path / "other"]
    for key in keys:
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)

    async def before(_: AsyncEngine, documents: Documents) -> None:
        await put(documents, "report", draft("some text"))

    async def after(_: AsyncEngine, documents: Documents) -> None:
        assert documents.of(None) == []
        assert "key" in (documents.damage_reason(None, "report") or "")

    async def again(_: AsyncEngine, documents: Documents) -> None:
        assert [document.text for document in documents.of(None)] == ["some text"]

    play(model, tables(tmp_path, encryption_key_file=str(keys[0])), before)
    play(model, tables(tmp_path, encryption_key_file=str(keys[1])), after)
    play(model, tables(tmp_path), after)
    play(model, tables(tmp_path, encryption_key_file=str(keys[0])), again)


@pytest.mark.long
def test_another_chat_template_makes_other_tokens_and_token_ids_are_not_believed(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    async def before(_: AsyncEngine, documents: Documents) -> None:
        await put(documents, "text", draft("some text"))
        await put(documents, "ids", tokens_draft(1, 50))

    async def after(_: AsyncEngine, documents: Documents) -> None:
        (document,) = documents.of(None)
        assert bytes(document.token_ids.tolist()) != b""
        assert tokenizer.decode(document.token_ids) == "[user]some text\n"
        await until(documents, document, lambda it: it.status is Status.READY)
        assert "another tokenizer" in (documents.damage_reason(None, "ids") or "")

    tokenizer = chat_tokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    play(model, tables(tmp_path), before)
    play(model, tables(tmp_path), after, tokenizer)


def test_a_file_that_cannot_be_written_is_the_caller_s_error_and_nothing_has_changed(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    async def story(_: AsyncEngine, documents: Documents) -> None:
        document = await put(documents, "report", tokens_draft(1, 100))
        remove(tmp_path / "store-documents")
        for change in (
            documents.put(None, "report", tokens_draft(2, 100)),
            documents.put(None, "other", tokens_draft(2, 100)),
            documents.pin(document, 60.0),
        ):
            with pytest.raises(OSError, match="No such file"):
                await change
        assert documents.of(None) == [document]
        assert document.pinned_until is None
        assert not (await documents.residence(document)).is_held

    play(model, tables(tmp_path), story)


def test_a_pin_whose_new_end_cannot_be_written_keeps_the_old_one(model: PreTrainedModel, tmp_path: Path) -> None:
    now = 1000.0

    async def story(llm: AsyncEngine, documents: Documents) -> None:
        nonlocal now
        await llm.ask(with_pins_by(lambda: now))
        document = await put(documents, "report", tokens_draft(1, 100))
        await documents.pin(document, 600.0)
        pinned_until = document.pinned_until
        remove(tmp_path / "store-documents")

        with pytest.raises(OSError, match="No such file"):
            await documents.pin(document, 9000.0)

        assert document.pinned_until == pinned_until
        await until(documents, document, lambda it: it.is_held)
        now += 601.0
        await until(documents, document, lambda it: not it.is_held)

    play(model, tables(tmp_path), story)


def test_documents_of_several_tenants_are_computed_in_turns(model: PreTrainedModel) -> None:
    done: list[str] = []
    with build_core(model, chat_tokenizer(), as_config(tables())) as core:
        prefills = DocumentPrefills(core, no_extra, lambda document, _: done.append(document.id))
        for document_id in ("ann 1", "ann 2", "ann 3", "bob 1", "eve 1", "bob 2"):
            tokens = np.array(list(document_id.encode()), np.int32)
            tenant = document_id.partition(" ")[0]
            prefills.add(Document(document_id, tenant, Form.TEXT, None, None, tokens, None, None, time.time()))

        while len(done) < 6:
            prefills.tick()
            core.step()

    assert done == ["ann 1", "bob 1", "eve 1", "ann 2", "bob 2", "ann 3"]


def test_a_change_does_not_wait_for_all_those_of_another_tenant(model: PreTrainedModel, tmp_path: Path) -> None:
    async def story(_: AsyncEngine, documents: Documents) -> None:
        done: list[str] = []

        async def delete(tenant: str, document_id: str) -> None:
            assert await documents.delete(tenant, document_id)
            done.append(tenant)

        theirs = [("ann", str(number)) for number in range(20)] + [("bob", "report")]
        for tenant, document_id in theirs:
            await put(documents, document_id, tokens_draft(1, 20), tenant)
        await asyncio.gather(*(delete(*whose) for whose in theirs))

        assert done.count("ann") == 20
        assert done.index("bob") < 10

    play(model, tables(tmp_path), story)


def test_a_folder_of_documents_is_open_once_at_a_time(model: PreTrainedModel, tmp_path: Path) -> None:
    folder = tmp_path / "store-documents"

    async def story(llm: AsyncEngine, documents: Documents) -> None:
        await put(documents, "report", tokens_draft(1, 100))
        (folder / "being written.doc.new").write_bytes(b"half")

        with pytest.raises(FolderInUse, match=f"^folder {folder} is open in process {os.getpid()}; stop it"):
            await Documents.open(llm, llm.config, salt_of, num_tenants=1)
        assert (folder / "being written.doc.new").exists()
        await documents.close()
        again = await Documents.open(llm, llm.config, salt_of, num_tenants=1)

        assert again.find(None, "report") is not None
        await again.close()

    play(model, tables(tmp_path), story)


def await_disk_threads() -> None:
    """Wait until the threads of folders that were closed, or whose opening was cancelled, have let go and ended."""
    for thread in threading.enumerate():
        if thread.name.startswith("kvtier-documents"):
            thread.join(DEADLINE_S / 2)
            assert not thread.is_alive()


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_documents_whose_opening_or_closing_was_cancelled_can_be_opened_again(
    model: PreTrainedModel, tmp_path: Path, late: bool
) -> None:
    async def story() -> None:
        async with AsyncEngine(model, tables(tmp_path), chat_tokenizer()) as llm:

            async def open_documents() -> Documents:
                return await Documents.open(llm, llm.config, salt_of, num_tenants=1)

            async def open_and_close() -> None:
                await (await open_documents()).close()

            for number in count():
                await cancelled_at(open_and_close(), number, late=late)
                await asyncio.to_thread(await_disk_threads)  # an opening that was cancelled has the folder until then
                closing = await cancelled_at((await open_documents()).close(), number, late=late)
                await asyncio.to_thread(await_disk_threads)
                if not closing and number > 9:
                    break
            await (await open_documents()).close()

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))


def test_whatever_the_thread_of_the_disk_raises_reaches_who_waits_for_it(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(llm: AsyncEngine, documents: Documents) -> None:
        monkeypatch.setattr(DocumentFolder, "write", lambda *_: next(iter(())))

        with pytest.raises(RuntimeError, match="StopIteration"):
            await documents.put(None, "report", tokens_draft(1, 100))

        assert documents.of(None) == []

    play(model, tables(tmp_path), story)


# --- callers that are cancelled


def in_folder(folder: Path) -> dict[str, tuple[list[int], bool]]:
    """Each document's tokens, and whether it is pinned, as the next process would find it if this one were killed."""
    found = {}
    with TemporaryDirectory() as copy, DocumentFolder(Path(copy), None, b"") as opened:
        shutil.copytree(folder, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.lock"))
        for _, outcome in read_all(opened):
            assert not isinstance(outcome, Damaged)
            document, _ = outcome
            found[document.id] = (document.token_ids.tolist(), document.pinned_until is not None)
    return found


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_a_change_whose_caller_is_cancelled_anywhere_is_made_as_a_whole(
    model: PreTrainedModel, tmp_path: Path, late: bool
) -> None:
    async def story(llm: AsyncEngine, documents: Documents) -> None:
        async def pin() -> None:
            if (document := documents.find(None, "report")) is not None:
                await documents.pin(document, 60.0)

        async def unpin() -> None:
            if (document := documents.find(None, "report")) is not None:
                await documents.unpin(document)

        for number in count():
            changes = [
                lambda number=number: documents.put(None, "report", tokens_draft(2 * number, 100)),
                pin,
                lambda number=number: documents.put(None, "report", tokens_draft(2 * number + 1, 100)),
                pin,
                unpin,
                pin,
                lambda: documents.delete(None, "report"),
            ]
            was_cancelled = False
            for change in changes:
                was_cancelled |= await cancelled_at(change(), number, late=late)
                await documents.delete(None, "what is not there")  # in its turn, behind all changes before

                here = {it.id: (it.token_ids.tolist(), it.pinned_until is not None) for it in documents.of(None)}
                assert in_folder(tmp_path / "store-documents") == here
                num_held = await llm.ask(held_bytes)
                assert (num_held > 0) is any(is_pinned for _, is_pinned in here.values())
            if not was_cancelled:
                break
        assert number > 2
        assert not documents.of(None)

    play(model, tables(tmp_path), story)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_nothing_is_held_for_documents_whose_opening_was_cancelled(
    model: PreTrainedModel, tmp_path: Path, late: bool
) -> None:
    async def pin(_: AsyncEngine, documents: Documents) -> None:
        await documents.pin(await put(documents, "report", tokens_draft(1, 100)), 3600.0)
        await documents.put(None, "other", tokens_draft(2, 100))

    async def story() -> None:
        opened: list[Documents] = []
        async with AsyncEngine(model, tables(tmp_path), chat_tokenizer()) as llm:

            async def open_documents() -> None:
                opened.append(await Documents.open(llm, llm.config, salt_of, num_tenants=1))

            for number in count():
                await cancelled_at(open_documents(), number, late=late)
                num_held, has_work = await llm.ask(lambda core: (held_bytes(core), core.has_work))
                if opened:
                    break
                assert (num_held, has_work) == (0, False)
                await asyncio.to_thread(await_disk_threads)  # the folder is closed
            assert number > 3
            assert num_held > 0
            await opened[0].close()

    play(model, tables(tmp_path), pin)
    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))
