"""DocumentPins with thousands of documents: each step looks at some of them."""

import time

import numpy as np
from document_tables import tables
from small_models import byte_tokenizer
from transformers import PreTrainedModel

from kvtier.engine.build import build_core
from kvtier.engine.config import as_config
from kvtier.engine.documents.document import Document, Form
from kvtier.engine.documents.pin_shares import PinShares
from kvtier.engine.documents.pins import MOST_LOOKED_AT, RENEW_S, DocumentPins
from kvtier.engine.scheduling.timed_pins import TimedPins
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS, BlockChain

NUM_DOCUMENTS = 3 * MOST_LOOKED_AT


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
