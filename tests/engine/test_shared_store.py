"""Engines that share a store and nothing else: the real model, the real tiers, a folder of objects or a Redis."""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from object_cases import ObjectRemoteCase
from remote_cases import REMOTES, empty_remote
from small_models import build, byte_tokenizer
from transformers import PreTrainedModel
from waiting import DEADLINE_S, wait_for

from kvtier.engine.build_core import build_core
from kvtier.engine.config import DiskConfig, RemoteConfig, as_config
from kvtier.engine.core import EngineCore
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.request import Request
from kvtier.engine.stores.disk_store import codec_of
from kvtier.store.codec.codec_choice import CodecChoice
from kvtier.store.remote.object_settings import ObjectSettings
from kvtier.tiers.lower.breaker import BreakerState
from kvtier.tiers.lower.name_set import block_key
from kvtier.tiers.lower.remote import inquiries
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.naming.block_hash import BlockName, ExtraKeys
from kvtier.tiers.naming.tier import Reason, Tier

NUM_TOKENS = 200  # of a document: twelve blocks, and the device has sixteen
WHOLE = 192
MAX_ROUNDS = 12
DOCUMENTS = [np.random.default_rng(number).integers(3, 90, NUM_TOKENS).tolist() for number in range(4)]


def codecs_of(table: type[msgspec.Struct]) -> Sequence[Any]:
    (field,) = [field for field in msgspec.structs.fields(table) if field.name == "codec"]
    return get_args(field.type)


@pytest.fixture(autouse=True)
def _no_answer_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiries, "ANSWER_S", DEADLINE_S)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return build("llama")


@pytest.fixture(params=REMOTES)
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with empty_remote(request.param, tmp_path) as url:
        yield url


def engine(model: PreTrainedModel, url: str, disk: Mapping[str, object] | None = None, **remote: object) -> EngineCore:
    tables = {
        "device": {"capacity": "320KiB", "block_size": 16},
        "host": {"capacity": "16MiB"},
        **({} if disk is None else {"disk": disk}),
        "remote": {"url": url, **remote},
        "scheduler": {"load": "always"},  # so small a model computes as fast as a busy machine loads
        "model": {"dtype": "float32"},
    }
    return build_core(model, byte_tokenizer(), as_config(tables))


def ask(core: EngineCore, document: Sequence[int], question: int = 5) -> Request:
    request = core.add([*document, question], SamplingParams(max_tokens=3), ExtraKeys(), time.monotonic())
    while core.has_work:
        core.step()
    return request


def remote(core: EngineCore) -> RemoteStatistics:
    found = core.cache.statistics().remote
    assert found is not None
    return found


def share(core: EngineCore) -> list[list[int]]:
    """Ask about each document until a round of questions puts no more into the store; the first answers."""
    answers = [ask(core, document).generated for document in DOCUMENTS]
    for _ in range(MAX_ROUNDS):
        num_stored = remote(core).num_stored
        for document in DOCUMENTS:
            ask(core, document, 6)
            wait_for(lambda: core.idle() or not (core.cache.drain.spill_rest() or remote(core).num_wanted))
        if remote(core).num_stored == num_stored >= len(DOCUMENTS) * WHOLE // 16:
            return answers
    raise AssertionError(f"not all was shared: {remote(core)}")


def test_a_second_engine_finds_what_a_first_one_has_computed(model: PreTrainedModel, where: str) -> None:
    with engine(model, where) as first:
        answers = share(first)
    with engine(model, where) as second:
        found = [ask(second, document) for document in DOCUMENTS]

    assert [request.generated for request in found] == answers
    for request in found:
        assert request.tokens is not None
        assert request.tokens.remote >= WHOLE - 16
        assert request.tokens.num_tokens == NUM_TOKENS + 1


def test_a_reset_leaves_what_machines_share_and_says_so(
    llama: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/objects"
    caplog.set_level(logging.INFO)
    with engine(llama, url) as core:
        share(core)

        assert core.reset()

        tokens = ask(core, DOCUMENTS[0]).tokens
        assert tokens is not None
        assert tokens.remote >= WHOLE - 16
        assert tokens.device == tokens.host == 0
    (said,) = [text for text in caplog.messages if text.startswith("reset:")]
    assert f"blocks in {url} stay and are found again" in said


def test_with_another_key_or_none_nothing_is_found(llama: PreTrainedModel, where: str, tmp_path: Path) -> None:
    keys = [tmp_path / name for name in ("one", "other")]
    for key in keys:
        key.write_bytes(os.urandom(32))
        key.chmod(0o600)
    with engine(llama, where, encryption_key_file=str(keys[0])) as first:
        answers = share(first)

    for others in ({}, {"encryption_key_file": str(keys[1])}):
        with engine(llama, where, **others) as second:
            request = ask(second, DOCUMENTS[0])
            assert request.generated == answers[0]
            assert request.tokens is not None
            assert request.tokens.remote == 0
            assert set(request.tokens.reasons) <= {Reason.NEVER_SEEN, Reason.LAST_BLOCK}, "they are not known here"
    with engine(llama, where, encryption_key_file=str(keys[0])) as second:
        assert [ask(second, document).generated for document in DOCUMENTS] == answers
        assert remote(second).usage.read_bytes > 0


def test_blocks_that_a_lossy_disk_has_rounded_are_found_by_no_exact_engine(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    url, disk = f"file://{tmp_path}/objects", {"path": str(tmp_path / "disk"), "capacity": "64MiB", "codec": "fp8"}
    with engine(llama, url) as exact:
        right = [ask(exact, document).generated for document in DOCUMENTS]
        assert remote(exact).num_stored == 0, "what is asked for once was shared"
    with engine(llama, url, disk=disk) as first:
        share(first)
    with engine(llama, url, disk=disk) as restarted:  # what it shares has been on the disk
        read = [ask(restarted, document).tokens for document in DOCUMENTS]
        assert all(tokens is not None and tokens.disk + tokens.remote >= WHOLE - 16 for tokens in read)

    with engine(llama, url) as exact:
        found = [ask(exact, document) for document in DOCUMENTS]
    with engine(llama, url, disk={**disk, "path": str(tmp_path / "another")}) as lossy:
        shared = ask(lossy, DOCUMENTS[0])

    assert [request.generated for request in found] == right
    assert [request.tokens.remote for request in found if request.tokens is not None] == [0] * len(DOCUMENTS)
    assert shared.tokens is not None
    assert shared.tokens.remote >= WHOLE - 16  # engines that all round share with each other


@pytest.mark.parametrize("codec", codecs_of(DiskConfig))
def test_the_namespace_of_every_tier_says_whether_the_disk_rounds(
    llama: PreTrainedModel, tmp_path: Path, codec: str
) -> None:
    url, disk = f"file://{tmp_path}/objects", {"path": str(tmp_path / "disk"), "capacity": "64MiB", "codec": codec}
    with engine(llama, url) as exact, engine(llama, url, disk=disk) as other:
        index, name = other.cache.lower.index, BlockName(bytes(32))  # type: ignore[attr-defined]  # in this process
        keys = [index.disk.key(0, name), index.remote.key(0, name), block_key(other.namespace, 0, name)]
        is_exact = other.namespace == exact.namespace

    assert len(set(keys)) == 1
    assert is_exact == (codec != "fp8")


def test_no_codec_of_a_store_that_machines_share_is_lossy() -> None:
    for codec in codecs_of(RemoteConfig):
        chosen = codec_of(RemoteConfig(url="redis://localhost", codec=codec), "torch.float32")
        assert isinstance(chosen, CodecChoice) or chosen.is_lossless


def test_what_somebody_has_changed_is_computed_anew(llama: PreTrainedModel, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/objects"
    with engine(llama, url) as first:
        answers = share(first)
    case, num_flipped = ObjectRemoteCase(ObjectSettings(url)), 0
    with engine(llama, url) as second:
        chain = second.chain([*DOCUMENTS[1], 5], ExtraKeys())
        namespace = second.cache.lower.index.remote  # type: ignore[attr-defined]  # these tiers are in this process
        key = namespace.key(0, chain.names[5])
        value = case.stored(key)
        case.overwrite(key, value[:-1] + bytes([value[-1] ^ 1]))
        num_flipped += 1

        request = ask(second, DOCUMENTS[1])

        assert request.generated == answers[1]
        assert request.tokens is not None
        assert request.tokens.remote == 5 * 16
        assert request.tokens.reasons[Reason.CORRUPT] > 0
        assert second.cache.statistics().tiers[Tier.REMOTE].corrupt == {"corrupt": num_flipped}


def test_a_store_that_is_away_costs_answers_nothing_and_is_told_of_once(
    llama: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with engine(llama, "redis://127.0.0.1:1") as core:
        wait_for(lambda: core.idle() or remote(core).breakers["ask"] is not BreakerState.CLOSED)
        for _ in range(3):
            for document in DOCUMENTS:
                request = ask(core, document)
                assert request.tokens is not None
                assert request.tokens.remote == 0
        assert remote(core).num_late == 0

    told = [record.getMessage() for record in caplog.records if "remote:" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("remote: redis://127.0.0.1:1 is paused (")
    assert told[0].endswith("serving without it")
