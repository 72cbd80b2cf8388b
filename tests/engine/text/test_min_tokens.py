"""MinTokens: texts that are too long are refused before they are tokenized."""

import random

import pytest
from small_models import byte_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvtier.cli.demo.model import build_tokenizer
from kvtier.engine.text.min_tokens import MinTokens, TooManyTokens

WORDS = ["the", "code", "of", "Falmouth", "is", "yarrow", "naïve", "e\u0301te\u0301", "한글", "1234567", "\t", "\n\n"]
MAX = 50


class CountingBackend:
    """A fast tokenizer's backend that counts the characters it is given."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.num_characters = 0

    def to_str(self) -> str:
        return self._backend.to_str()

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list:
        self.num_characters += sum(map(len, texts))
        return self._backend.encode_batch(texts, add_special_tokens=add_special_tokens)


class Counted:
    """A tokenizer that counts how much of a text it was given."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.backend_tokenizer = CountingBackend(tokenizer.backend_tokenizer)


def trained(model: object, trainer: object, **parts: object) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def as_qwen() -> PreTrainedTokenizerFast:
    """A tokenizer like Qwen's: bytes, composed characters, words of a pattern, and a token of many blanks."""
    pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = trained(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False),
        normalizer=normalizers.NFC(),
        pre_tokenizer=pre_tokenizers.Sequence([split, bytes_of]),
        decoder=decoders.ByteLevel(),
    )
    tokenizer.add_tokens([" " * 64])
    return tokenizer


def as_llama_2() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: no words, and single bytes for unknown characters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        WORDS * 20, trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def as_bert() -> PreTrainedTokenizerFast:
    """A tokenizer like BERT's: drops blanks and accents, and has one token for each unknown word."""
    return trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=100, special_tokens=["[UNK]"], show_progress=False),
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    )


def as_t5() -> PreTrainedTokenizerFast:
    """A tokenizer like T5's: the likeliest pieces of words, one token for any run of unknown characters."""
    return trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False),
        pre_tokenizer=pre_tokenizers.Metaspace(),
    )


KINDS = {"demo": build_tokenizer, "bytes": byte_tokenizer} | {
    make.__name__: make for make in (as_qwen, as_llama_2, as_bert, as_t5)
}


def random_text(rng: random.Random) -> str:
    """Words, runs of one character, and characters of all kinds."""
    parts = []
    for _ in range(rng.randrange(1, 80)):
        kind = rng.randrange(4)
        if kind == 0:
            parts.append(rng.choice(" \nxé한\u0301") * rng.randrange(1, 300))
        elif kind == 1:
            parts.append("".join(chr(rng.randrange(1, 0xD800)) for _ in range(rng.randrange(1, 9))))
        else:
            parts.append(rng.choice(WORDS) + rng.choice(["", " ", "  "]))
    return "".join(parts)


def refused_at(min_tokens: MinTokens, text: str, limit: int) -> int | None:
    """The tokens that a refused text has at least."""
    try:
        min_tokens.check(text, limit)
    except TooManyTokens as refused:
        return refused.min_num_tokens
    return None


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_has_more_tokens_than_it_may(kind: str) -> None:
    tokenizer, seed = KINDS[kind](), random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, min_tokens, num_refused = random.Random(seed), MinTokens(tokenizer), 0

    for _ in range(400):
        text, limit = random_text(rng), rng.choice([0, 1, 5, MAX, 300])
        min_num_tokens = refused_at(min_tokens, text, limit)
        if min_num_tokens is not None:
            num_refused += 1
            assert limit < min_num_tokens <= len(tokenizer(text, add_special_tokens=False)["input_ids"])

    assert num_refused > 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_is_refused_after_a_look_at_a_small_part_of_it(kind: str) -> None:
    tokenizer = Counted(KINDS[kind]())
    text = "the code of Falmouth is yarrow. " * 20_000

    with pytest.raises(TooManyTokens):
        MinTokens(tokenizer).check(text, MAX)

    assert tokenizer.backend_tokenizer.num_characters < 20 * MAX


@pytest.mark.parametrize(("kind", "longest"), [("bytes", 1), ("as_qwen", 64), ("demo", None), ("as_bert", None)])
def test_the_longest_token_is_known_where_nothing_of_a_text_is_dropped(kind: str, longest: int | None) -> None:
    assert MinTokens(KINDS[kind]()).longest_token == longest
