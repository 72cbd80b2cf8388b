"""How many tokens a beginning of a text has."""

import random

import pytest
from small_models import byte_tokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from kvtier.engine.text.min_tokens import MinTokens, PromptLimit, TooManyTokens
from kvtier.engine.text.prefixed_text import PrefixedText, num_common

TEXT = "The harbour is blue, as the sea is. The garden — blü — is in the harbour, and so on."


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens of several characters, which merge over the places where texts are cut."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.train_from_iterator([TEXT] * 3, BpeTrainer(vocab_size=300, initial_alphabet=ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def limit(tokenizer: PreTrainedTokenizerFast, max_tokens: int = 1000) -> PromptLimit:
    return PromptLimit(MinTokens(tokenizer), 1000, max_tokens)


def test_a_beginning_has_the_tokens_that_lie_wholly_in_it() -> None:
    tokenizer = merging_tokenizer()
    whole = PrefixedText(tokenizer, TEXT, limit(tokenizer))

    for num_chars in range(len(TEXT) + 1):
        num_tokens = whole.num_common_tokens(TEXT[:num_chars] + "#")

        assert TEXT[:num_chars].startswith(tokenizer.decode(whole.token_ids[:num_tokens]).rstrip("\ufffd"))
        longer = tokenizer.decode(whole.token_ids[: num_tokens + 1])
        assert num_chars == len(TEXT) or not TEXT[:num_chars].startswith(longer)


def test_a_text_that_is_all_in_common_has_all_tokens() -> None:
    tokenizer = byte_tokenizer()
    whole = PrefixedText(tokenizer, "abc", limit(tokenizer))

    assert whole.num_common_tokens("abcdef") == 3


def test_a_text_that_is_too_long_is_refused_before_it_is_tokenized() -> None:
    tokenizer = byte_tokenizer()

    with pytest.raises(TooManyTokens):
        PrefixedText(tokenizer, "abc", limit(tokenizer, max_tokens=2))


def test_the_common_beginning_of_two_texts_is_what_comparing_them_letter_by_letter_says() -> None:
    rng = random.Random(3)
    for _ in range(300):
        one, other = ("".join(rng.choice("ab") for _ in range(rng.randrange(9))) for _ in range(2))
        alike = [a == b for a, b in zip(one, other, strict=False)]

        assert num_common(one, other) == ([*alike, False].index(False))
        assert num_common(one, one + other) == len(one)
