"""DocumentPins with thousands of documents: each step looks at some of them."""

import time

import numpy as np
import pytest
from document_tables import tables
from small_models import byte_tokenizer
from transformers import PreTrainedModel

from kvtier.engine.build_core import build_core
from kvtier.engine.config import as_config
from kvtier.engine.scheduling.timed_pins import TimedPins
from kvtier.server.documents.document import Document, Form
from kvtier.server.documents.pin_shares import PinShares
from kvtier.server.documents.pins import MAX_LOOKED_AT, RENEW_S, DocumentPins, NoRoomToPin
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS, BlockChain

NUM_DOCUMENTS = 3 * MAX_LOOKED_AT


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def document(number: int) -> Document:
    tokens = np.full(20, number, np.int32)
    return Document(str(number), None, Form.TEXT, None, None, tokens, None, None, time.time())


def test_of_many_documents_one_is_renewed_after_a_step_and_all_in_the_end(model: PreTrainedModel) -> None:
    renewed: list[str] = []
    clock = FakeClock()

    def chain_of(document: Document) -> BlockChain:
        renewed.append(document.id)
        return core.chain(document.token_ids, NO_EXTRA_KEYS)

    with build_core(model, byte_tokenizer(), as_config(tables(num_host_slots=3 * NUM_DOCUMENTS))) as core:
        core.pins = TimedPins(core.cache, clock)
        pins = DocumentPins(core, chain_of, lambda _: None, PinShares(core, 1))
        documents = [document(number) for number in range(NUM_DOCUMENTS)]
        for each in documents:
            pins.pin(each, 2 * RENEW_S)
        renewed.clear()
        clock.now += RENEW_S + 1
        for step in range(NUM_DOCUMENTS):
            pins.tick()
            assert len(renewed) <= step + 1
        assert sorted(renewed) == sorted(each.id for each in documents)

        clock.now += RENEW_S
        for _ in range(NUM_DOCUMENTS):
            pins.tick()
        renewed.clear()
        clock.now += RENEW_S
        for _ in range(NUM_DOCUMENTS):
            pins.tick()

        assert not renewed  # their time is over
        core.cache.check()


def test_a_pin_that_may_not_be_made_longer_lasts_as_long_as_it_did(model: PreTrainedModel) -> None:
    """Its tenant was given the smaller share of more tenants meanwhile."""
    clock = FakeClock()
    with build_core(model, byte_tokenizer(), as_config(tables(num_host_slots=2))) as core:
        core.pins = TimedPins(core.cache, clock)
        shares = PinShares(core, 1)
        pins = DocumentPins(core, lambda it: core.chain(it.token_ids, NO_EXTRA_KEYS), lambda _: None, shares)
        report = document(1)
        pins.pin(report, RENEW_S / 2)
        held_bytes = core.pins.num_bytes(None)
        assert held_bytes > 0

        shares.num_tenants = 2
        with pytest.raises(NoRoomToPin):
            pins.pin(report, 2 * RENEW_S)

        assert core.pins.num_bytes(None) == held_bytes
        clock.now += RENEW_S / 2
        pins.tick()
        assert core.pins.num_bytes(None) == 0
