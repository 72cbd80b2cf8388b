"""Grammars: compiles what texts have to be, for one tokenizer, and keeps what was compiled lately."""

import json
import threading
from collections import OrderedDict
from copy import copy
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from kvtier.engine.model.sampling import WrongParameter
from kvtier.engine.model.structured.grammar import Grammar, Vocabulary
from kvtier.engine.model.structured.structured_outputs import StructuredOutputs

if TYPE_CHECKING:  # an optional package
    from llguidance import LLTokenizer

MOST_KEPT = 128
_END_MARK = "<|kvtier: the text may end|>"


class Grammars:
    """The grammars of one tokenizer. Any thread may compile; the same grammar is compiled once.

    The first use reads the vocabulary, which takes half a second for 150,000 tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        """The model has *vocab_size* logits, and *end_token_ids* end its texts."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._reading = threading.Lock()
        self._read: tuple[LLTokenizer, Vocabulary] | None = None
        self._lock = threading.Lock()  # guards what is kept
        self._kept: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()

    def compile(self, asked: StructuredOutputs) -> Grammar:
        """The grammar of what is *asked*. It may take a second: do not call it in an engine's thread.

        `WrongParameter` for what is no grammar, cannot be enforced, or would cost too much.
        """
        with self._lock:
            if (kept := self._kept.get(asked)) is not None:
                self._kept.move_to_end(asked)
                return kept
        grammar = self._compiled(asked)
        with self._lock:
            self._kept[asked] = grammar
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _compiled(self, asked: StructuredOutputs) -> Grammar:
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise WrongParameter(asked.asked_as, "needs llguidance; pip install 'kvtier[structured]'") from None
        tokens, vocabulary = self._vocabulary(asked)
        matcher = LLMatcher(tokens, grammar_text(asked), log_level=0)
        if matcher.is_error():
            raise WrongParameter(asked.asked_as, f"cannot be used: {matcher.get_error()}")
        return Grammar(matcher, vocabulary)

    def _vocabulary(self, asked: StructuredOutputs) -> "tuple[LLTokenizer, Vocabulary]":
        from llguidance import LLTokenizer

        with self._reading:
            if self._read is None:
                if not self._tokenizer.is_fast:
                    raise WrongParameter(asked.asked_as, "needs a fast tokenizer, which this model does not have")
                tokenizer = copy(self._tokenizer.backend_tokenizer)
                tokenizer.no_padding()
                tokenizer.no_truncation()
                tokenizer.add_special_tokens([_END_MARK])
                end_mark = tokenizer.token_to_id(_END_MARK)
                vocabulary = Vocabulary(self._vocab_size, self._end_token_ids, end_mark)
                self._read = LLTokenizer(tokenizer.to_str(), eos_token=end_mark), vocabulary
            return self._read


def grammar_text(asked: StructuredOutputs) -> str:
    """What is *asked* in llguidance's notation. `WrongParameter` for a grammar in GBNF with mistakes."""
    from llguidance import LLMatcher, grammar_from, regex_to_lark

    match asked.kind:
        case "regex":
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(asked.text, 'd')}/")
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, asked.choice or ())))
        case "grammar":
            try:
                return grammar_from("grammar", asked.text)
            except ValueError as error:
                raise WrongParameter(asked.asked_as, f"cannot be used: {error}") from None
    return LLMatcher.grammar_from_json_schema(
        asked.text,
        overrides={
            "whitespace_pattern": WHITESPACE,
            "lenient": not asked.strict,
            "coerce_one_of": not asked.strict,
        },
    )


def _quoted(text: str) -> str:
    """A text in Lark's notation, which is JSON's but for characters beyond the first 65,536."""
    return json.dumps(text, ensure_ascii=False)


# Between the parts of JSON, enough for a deep indentation. Without a limit a model may write blanks for ever.
WHITESPACE = r"[ \n\r\t]{0,32}"
