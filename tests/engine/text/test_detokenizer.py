"""Detokenizer: the pieces of a stream join to the text, and none has to be taken back."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvtier.engine.text.detokenizer import Detokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog, twice.",
    "  indented code:\n\tdef f(x): return x + 1",
    "缓存把提示的前缀留在内存里。日本語のテキストも。",
    "Grüße an die Größe 🙂🚀 und 👩🏽‍🚀, naïve café",
]


def wrap(tokenizer):
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def byte_level():
    """A byte-level BPE of a few merges: every byte is a token, most characters beyond ASCII are several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    return wrap(tokenizer)


def word_level():
    """Words that the decoder joins by spaces."""
    words = sorted({word for line in LINES for word in line.split()})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrap(tokenizer)


def word_pieces():
    """Words and `##` endings, joined by a decoder with its own ideas of spaces."""
    words = {word: i for i, word in enumerate(["un", "##know", "##able", "is", ".", ",", "don", "'", "t", "?"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="un"))
    tokenizer.decoder = decoders.WordPiece()
    return wrap(tokenizer)


def byte_fallback():
    """A few words with `▁` for a space, the first stripped; bytes for every other character."""
    words = ["▁", "▁the", "▁fox", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    return wrap(tokenizer)


TOKENIZERS = {make.__name__: make() for make in (byte_level, word_level, word_pieces, byte_fallback)}
BYTES = TOKENIZERS["byte_level"]


def tokens_of(data):
    """The byte-level token of each byte: printable bytes are written as themselves, the others from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    written = [chr(byte if byte in printable else 256 + others.index(byte)) for byte in data]
    return BYTES.convert_tokens_to_ids(written)


def stream(tokenizer, token_ids, stop=(), min_tokens=0):
    """The detokenizer after *token_ids*, and the pieces it gave."""
    detokenizer = Detokenizer(tokenizer, stop, min_tokens)
    pieces = []
    for token_id in token_ids:
        pieces.append(detokenizer.push(token_id))
        assert detokenizer.text == "".join(pieces)
    pieces.append(detokenizer.flush())
    assert detokenizer.text == "".join(pieces)
    return detokenizer, pieces


def decode(tokenizer, token_ids):
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_a_text_comes_back_whole_and_never_has_a_mark_for_missing_bytes(name, line):
    tokenizer = TOKENIZERS[name]
    if name == "byte_level":
        token_ids = tokenizer.encode(line)
    else:
        token_ids = tokenizer.convert_tokens_to_ids(["▁", *(f"<0x{byte:02X}>" for byte in line.encode())])

    _, pieces = stream(tokenizer, token_ids)

    assert "".join(pieces) == line
    assert "\ufffd" not in "".join(pieces)
    assert sum(map(bool, pieces)) > len(pieces) / 5  # it does stream


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("name", ["byte_level", "word_level", "word_pieces"])
def test_random_tokens_give_the_text_of_a_full_decode(name, seed):
    tokenizer = TOKENIZERS[name]
    token_ids = random.Random(seed).choices(range(len(tokenizer) + 3), k=150)  # specials and ids beyond the vocabulary

    detokenizer, _ = stream(tokenizer, token_ids)

    assert detokenizer.text == decode(tokenizer, token_ids), f"{seed=}"
    assert not detokenizer.stopped


@pytest.mark.parametrize("seed", range(40))
def test_characters_that_fall_back_to_bytes_give_the_text_of_a_full_decode(seed):
    tokenizer = TOKENIZERS["byte_fallback"]
    words = [["▁the"], ["▁fox"], ["s"], ["▁"], ["<end>"]]
    characters = [[f"<0x{byte:02X}>" for byte in character.encode()] for character in "aé缓存🙂"]
    picked = random.Random(seed).choices([*words, *characters], k=60)
    token_ids = tokenizer.convert_tokens_to_ids([token for tokens in picked for token in tokens])

    detokenizer, _ = stream(tokenizer, token_ids)

    assert detokenizer.text == decode(tokenizer, token_ids), f"{seed=}"


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_give_the_text_of_a_full_decode(seed):
    pick = random.Random(seed)
    parts = [b"\xff" * 20, b"\x80\x80", b"\xf0\x9f\x98", b"\xe4\xbd", "缓存🙂é".encode(), b" a", "\ufffd".encode()]
    token_ids = tokens_of(b"".join(pick.choices(parts, k=60)))

    detokenizer, _ = stream(BYTES, token_ids)

    assert detokenizer.text == decode(BYTES, token_ids), f"{seed=}"


def test_a_word_is_shown_as_soon_as_its_token_comes():
    tokenizer = TOKENIZERS["word_level"]

    _, pieces = stream(tokenizer, tokenizer.encode("The quick brown fox"))

    assert pieces == ["The", " quick", " brown", " fox", ""]


def test_an_emoji_is_shown_when_its_last_byte_comes():
    _, pieces = stream(BYTES, tokens_of("a🙂b".encode()))

    assert pieces == ["a", "", "", "", "🙂", "b", ""]


def test_an_incomplete_character_at_the_end_is_flushed():
    detokenizer, pieces = stream(BYTES, tokens_of(b"a\xf0\x9f"))

    assert pieces == ["a", "", "", "\ufffd"]
    assert detokenizer.text == "a\ufffd"


def test_the_cost_of_a_token_does_not_grow_with_the_text():
    class Counting:
        all_special_ids = BYTES.all_special_ids

        def decode(self, token_ids, **options):
            longest.append(len(token_ids))
            return BYTES.decode(token_ids, **options)

    longest = []
    end, beyond = BYTES.eos_token_id, len(BYTES)
    text, garbage = tokens_of("The fox. 缓存".encode() * 20), tokens_of(b"\xff" * 100)
    stream(Counting(), [*[beyond] * 100, *text, *[end] * 100, *[beyond] * 100, *garbage])

    assert max(longest) < 12


def test_nothing_of_a_stop_string_or_after_it_is_shown():
    detokenizer, pieces = stream(BYTES, tokens_of(b"yes\n\nUser: more"), stop=["\n\nUser:"])

    assert detokenizer.text == "yes"
    assert detokenizer.stopped
    assert pieces == ["y", "e", "s"] + [""] * (len(pieces) - 3)


def test_what_only_began_like_a_stop_string_is_shown_after_all():
    _, pieces = stream(BYTES, tokens_of(b"aab aac"), stop=["aac!"])

    assert pieces == ["", "", "aab", " ", "", "", "", "aac"]


def test_the_stop_string_that_is_complete_first_wins_however_the_tokens_fall():
    words = TOKENIZERS["word_level"]
    stop = ["indented", "de"]

    in_bytes, _ = stream(BYTES, tokens_of(b"indented"), stop)
    in_one, _ = stream(words, words.convert_tokens_to_ids(["indented"]), stop)

    assert in_bytes.text == in_one.text == "in"


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("name", ["byte_level", "word_level"])
def test_a_stop_string_cuts_random_text_where_it_first_ends(name, seed):
    tokenizer = TOKENIZERS[name]
    pick = random.Random(seed)
    token_ids = pick.choices(tokenizer.encode(LINES[seed % len(LINES)]), k=80)
    full = decode(tokenizer, token_ids)
    at = pick.randrange(len(full) - 12)
    stop = [full[at : at + pick.randint(1, 12)], "never to be found"]

    detokenizer, _ = stream(tokenizer, token_ids, stop)

    assert detokenizer.text == full[: full.index(stop[0])], f"{seed=}"
    assert detokenizer.stopped


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(0, "x"), (2, "x"), (3, "xabyy"), (6, "xabyy"), (7, "xabyyabz"), (9, "xabyyabz"), (10, "xabyyabzab")],
)
def test_a_stop_string_that_is_complete_within_the_first_tokens_is_none(min_tokens, expected):
    detokenizer, _ = stream(BYTES, tokens_of(b"xabyyabzab"), ["ab"], min_tokens)

    assert detokenizer.text == expected


def test_a_stop_string_that_begins_within_the_first_tokens_and_ends_behind_them_ends_the_text():
    detokenizer, pieces = stream(BYTES, tokens_of(b"xabcd"), ["abc"], min_tokens=3)

    assert (detokenizer.text, detokenizer.stopped) == ("x", True)
    assert pieces[:3] == ["x", "", ""]


def test_what_was_held_back_for_a_longer_stop_string_has_no_shorter_one_that_was_passed_over():
    detokenizer, _ = stream(BYTES, tokens_of(b"xaby"), ["ab", "xabc"], min_tokens=3)

    assert (detokenizer.text, detokenizer.stopped) == ("xaby", False)
