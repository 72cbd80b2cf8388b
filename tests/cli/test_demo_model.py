import copy
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvtier.cli.demo.document import (
    NAMES,
    QUESTION,
    WORDS,
    Document,
    Fact,
    is_right,
    make_document,
    question,
    vocabulary,
)
from kvtier.cli.demo.model import build_demo_model

BLOCK_SIZE = 64


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """On busy cores the threads of small operations wait for each other: three times slower with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Reader:
    """One document computed once by plain transformers; every question continues from its KV cache."""

    def __init__(self, document: Document) -> None:
        self.model, self.tokenizer = build_demo_model()
        self.document = document
        self.token_ids: list[int] = self.tokenizer(document.text).input_ids
        self.cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(torch.tensor([self.token_ids]), past_key_values=self.cache, logits_to_keep=1)

    def ask(self, names: list[str]) -> list[str]:
        """The greedy answers to all questions, computed in one batch; special tokens are shown."""
        # A name is one token, so the prompts are equally long.
        prompts = self.tokenizer([question(self.document.text, name) for name in names], return_tensors="pt")
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(len(names))
        output = self.model.generate(**prompts, past_key_values=cache, max_new_tokens=4, do_sample=False)
        return self.tokenizer.batch_decode(output[:, prompts.input_ids.shape[1] :])

    def wrong_facts(self) -> list[Fact]:
        answers = self.ask([fact.name for fact in self.document.facts])
        return [fact for fact, answer in zip(self.document.facts, answers, strict=True) if not is_right(answer, fact)]

    def block_of(self, fact: Fact) -> slice:
        """The tokens of the block that holds the fact's word."""
        name_at = self.token_ids.index(self.tokenizer.convert_tokens_to_ids(f" {fact.name}"))
        start = (name_at + 2) // BLOCK_SIZE * BLOCK_SIZE
        return slice(start, start + BLOCK_SIZE)

    def replace(self, tokens: slice, other: "Reader | None") -> None:
        """Put the *other* document's KV bytes in place of those of *tokens*, or zeros."""
        for layer_id, layer in enumerate(self.cache.layers):
            for name in ("keys", "values"):
                kv = getattr(layer, name)  # [1, num_kv_heads, tokens, head_dim]
                kv[:, :, tokens] = getattr(other.cache.layers[layer_id], name)[:, :, tokens] if other else 0


def test_every_answer_is_the_word_and_then_the_end():
    reader = Reader(make_document(seed=1, num_tokens=1000))

    answers = reader.ask([fact.name for fact in reader.document.facts])

    assert len(answers) == 40
    assert answers == [f" {fact.word}</s>" for fact in reader.document.facts]


@pytest.mark.long
def test_every_answer_is_right_after_a_long_text():
    model, tokenizer = build_demo_model()
    document = make_document(seed=8, num_tokens=8000)
    # One forward pass over all questions in a row, each with its answer, all equally long.
    dialogue = "".join(QUESTION.format(name=fact.name) + f" {fact.word}" for fact in document.facts)
    token_ids = tokenizer(document.text + dialogue, return_tensors="pt").input_ids
    num_asked = len(tokenizer.tokenize(dialogue))

    with torch.no_grad():
        logits = model(token_ids, logits_to_keep=num_asked).logits[0]  # [num_asked, vocab]

    said = tokenizer.convert_ids_to_tokens(logits.argmax(-1).tolist())
    step = num_asked // 40
    assert said[step - 2 :: step] == [f" {fact.word}" for fact in document.facts]
    assert said[step - 1 :: step] == ["</s>"] * 40


def test_a_name_the_text_does_not_tell_gets_no_answer():
    reader = Reader(make_document(seed=1, num_tokens=1000))
    told = {fact.name for fact in reader.document.facts}

    answers = reader.ask([name for name in NAMES[:50] if name not in told])

    assert set(answers) == {"</s>"}


def test_a_zeroed_block_loses_its_own_facts_and_no_others():
    reader = Reader(make_document(seed=2, num_tokens=1000))
    facts = reader.document.facts
    damaged = reader.block_of(facts[20])

    reader.replace(damaged, None)

    wrong = reader.wrong_facts()
    assert facts[20] in wrong
    assert wrong == [fact for fact in facts if reader.block_of(fact) == damaged]


def test_a_block_of_another_document_makes_the_answer_wrong():
    reader = Reader(make_document(seed=3, num_tokens=1000))
    foreign = Reader(make_document(seed=4, num_tokens=1000))
    fact = reader.document.facts[20]

    reader.replace(reader.block_of(fact), foreign)

    assert fact in reader.wrong_facts()


def test_a_stale_text_of_the_same_facts_answers_with_the_stale_word():
    document = make_document(seed=5, num_tokens=1000)
    fact = document.facts[20]
    stale_word = next(word for word in WORDS if word not in document.text)
    stale_text = re.sub(rf"\b{fact.word}\b", stale_word, document.text)
    reader, stale = Reader(document), Reader(Document(stale_text, document.facts))

    reader.replace(reader.block_of(fact), stale)

    assert reader.ask([fact.name]) == [f" {stale_word}</s>"]


def test_the_same_bytes_are_built_every_time():
    first, second = (build_demo_model()[0].state_dict() for _ in range(2))

    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_saved_model_loads_as_any_other(tmp_path):
    model, tokenizer = build_demo_model()
    document = make_document(seed=6, num_tokens=500, num_facts=5)
    prompt = question(document.text, document.facts[0].name)

    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded_model = AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    inputs = loaded_tokenizer(prompt, return_tensors="pt")
    assert inputs.input_ids.tolist() == [tokenizer(prompt).input_ids]
    output = loaded_model.generate(**inputs, max_new_tokens=4)
    assert loaded_tokenizer.decode(output[0]) == f"<s>{prompt} {document.facts[0].word}</s>"


def test_a_text_comes_back_from_its_tokens():
    _, tokenizer = build_demo_model()
    document = make_document(seed=7, num_tokens=4000, num_facts=len(NAMES))
    text = question(document.text, "Rowan")

    token_ids = tokenizer(text).input_ids

    assert tokenizer.unk_token_id not in token_ids
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text


def test_an_unknown_word_is_one_unknown_token():
    _, tokenizer = build_demo_model()

    assert tokenizer.decode(tokenizer("Hello, xylograph!").input_ids) == "<s>Hello,<unk>!"


def test_no_name_is_an_ordinary_word():
    words = [word.lower() for word in vocabulary()]

    assert len(NAMES) == len(set(NAMES)) >= 200
    assert len(WORDS) == len(set(WORDS)) >= len(NAMES)
    assert [name for name in NAMES if words.count(name.lower()) > 1] == []


def test_another_seed_has_another_title_and_another_word_for_every_name():
    words = [{fact.name: fact.word for fact in make_document(seed, 1000, len(NAMES)).facts} for seed in range(5)]
    titles = {make_document(seed, 1000).text.partition("\n")[0] for seed in range(5)}

    assert len(titles) == 5
    assert all(len({of_seed[name] for of_seed in words}) == 5 for name in NAMES)


def test_documents_share_a_handful_of_tokens_at_most():
    _, tokenizer = build_demo_model()
    # Seeds 3 and 3 + 23 name the same place.
    first, second = (tokenizer(make_document(seed, 1000).text).input_ids for seed in (3, 26))

    assert first[:10] != second[:10]


def test_a_document_is_as_long_as_asked_and_tells_each_name_once_in_even_steps():
    _, tokenizer = build_demo_model()
    document = make_document(seed=8, num_tokens=4000)
    tokens = tokenizer.tokenize(document.text)

    places = [tokens.index(f" {fact.name}") for fact in document.facts]

    assert 4000 <= len(tokens) < 4060
    assert all(document.text.count(fact.name) == 1 for fact in document.facts)
    assert max(after - before for before, after in zip([0, *places], [*places, 4000], strict=True)) < 160
    assert document == make_document(seed=8, num_tokens=4000)


def test_more_facts_than_names_is_the_callers_mistake():
    with pytest.raises(ValueError, match="give 0 to"):
        make_document(seed=0, num_tokens=1000, num_facts=len(NAMES) + 1)


@pytest.mark.parametrize(
    ("answer", "right"),
    [(" copper", True), ("The code of Rowan is Copper.", True), ("coppers", False), ("", False), ("tin", False)],
)
def test_a_free_answer_is_right_if_it_holds_the_word(answer, right):
    assert is_right(answer, Fact("Rowan", "copper")) is right
