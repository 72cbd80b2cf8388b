"""TokenBans: which tokens parameters ban, as a tokenizer and a model have them."""

import pytest
from small_models import byte_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvtier.engine.model.drawing.token_bans import NO_BANS, TokenBans
from kvtier.engine.model.sampling import InvalidParameter, SamplingParams

ENDS = frozenset({0, 9})


def words(*pieces: str) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words and those that follow a space."""
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=pieces[0])


def test_parameters_that_ban_nothing_give_no_bans() -> None:
    assert TokenBans.of(SamplingParams(stop_token_ids=[4]), byte_tokenizer(), ENDS, 300) == NO_BANS
    assert not NO_BANS


@pytest.mark.parametrize(("ignores", "banned"), [(False, [0, 4, 9]), (True, [4])])
def test_what_would_end_the_text_is_banned_before_min_tokens(ignores: bool, banned: list[int]) -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[4, 10**9], ignore_eos=ignores)

    bans = TokenBans.of(params, byte_tokenizer(), ENDS, 300)

    assert [list(bans.after(output)) for output in ([], [1], [1, 2])] == [banned, banned, []]


def test_a_bad_word_is_banned_as_it_begins_a_text_and_as_it_stands_within() -> None:
    tokenizer = words("?", "cat", " cat", "the", " dog")

    bans = TokenBans.of(SamplingParams(bad_words=["cat", " dog"]), tokenizer, ENDS, 5)

    assert bans.bad_words == ((1,), (2,), (0,), (4,))  # "dog" begins no text: it is unknown there


def test_a_bad_word_of_several_tokens_is_banned_at_its_last() -> None:
    bans = TokenBans.of(SamplingParams(bad_words=["ab"]), byte_tokenizer(), ENDS, 300)
    a, b = byte_tokenizer()("ab")["input_ids"]

    assert [list(bans.after(output)) for output in ([], [a], [a, 3], [3, a])] == [[], [b], [], [b]]


def test_a_bad_word_that_the_model_has_no_logits_for_is_refused_by_name() -> None:
    with pytest.raises(InvalidParameter, match=r"^bad_words has token id 1; the model knows 0 to 0") as error:
        TokenBans.of(SamplingParams(bad_words=["cat"]), words("?", "cat"), ENDS, 1)

    assert error.value.name == "bad_words"
