"""Grammars: a compiler of structured outputs for one tokenizer, with a cache of recent grammars."""

import threading
from collections import OrderedDict
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from kvtier.engine.model.sampling import InvalidParameter
from kvtier.engine.model.structured.grammar import Grammar, Vocabulary
from kvtier.engine.model.structured.notation import limits
from kvtier.engine.model.structured.structured_outputs import StructuredOutputs
from kvtier.engine.model.structured.trial import TrialResult, run_trial
from kvtier.extras import MissingExtra, extra

if TYPE_CHECKING:  # an optional package
    from llguidance import LLTokenizer

MAX_KEPT = 256
MAX_KEPT_BYTES = 256 << 20
_END_MARK = "<|kvtier: the text may end|>"


class Grammars:
    """A compiler of grammars for one tokenizer. Any thread may use it.

    It caches the 256 most recently used grammars, or fewer if they exceed 256 MiB.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        """Create an empty cache for a model with *vocab_size* logits and these end tokens."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._reading = threading.Lock()
        self._read: tuple[LLTokenizer, Vocabulary] | None = None
        self._lock = threading.Lock()  # guards the cache
        self._kept: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()
        self._kept_bytes = 0

    def prepare(self) -> None:
        """Read the tokenizer's vocabulary now rather than with the first grammar.

        This takes a second for 150,000 tokens, during which no other thread runs. Do nothing if llguidance cannot read
        the vocabulary.
        """
        with suppress(InvalidParameter):
            self._vocabulary("")

    def compile(self, asked: StructuredOutputs) -> Grammar:
        """Return the compiled grammar of the constraint *asked*, from the cache if it is there.

        Compiling takes 0.1 s, so do not call this in the engine's thread.

        Raises:
            InvalidParameter: If *asked* is not a valid grammar, cannot be enforced, or takes too much time or memory.
        """
        with self._lock:
            if (kept := self._kept.get(asked)) is not None:
                self._kept.move_to_end(asked)
                return kept
        tokens, vocabulary = self._vocabulary(asked.parameter_name)
        grammar = compiled(asked, run_trial(asked), tokens, vocabulary)
        with self._lock:
            self._keep(asked, grammar)
        return grammar

    def _keep(self, asked: StructuredOutputs, grammar: Grammar) -> None:
        if asked in self._kept:  # another thread compiled it at the same time
            return
        self._kept[asked] = grammar
        self._kept_bytes += grammar.num_bytes
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.num_bytes

    def _vocabulary(self, parameter_name: str) -> "tuple[LLTokenizer, Vocabulary]":
        with self._reading:
            if self._read is None:
                self._read = self._read_vocabulary(parameter_name)
            return self._read

    def _read_vocabulary(self, parameter_name: str) -> "tuple[LLTokenizer, Vocabulary]":
        try:
            with extra("structured", parameter_name):
                from llguidance import LLTokenizer
        except MissingExtra as error:
            raise InvalidParameter(parameter_name, f"needs llguidance; {error.remedy}") from None
        if not self._tokenizer.is_fast:
            raise InvalidParameter(parameter_name, "needs a fast tokenizer, which this model does not have")
        tokenizer = copy(self._tokenizer.backend_tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.add_special_tokens([_END_MARK])
        end_mark = tokenizer.token_to_id(_END_MARK)
        try:
            tokens = LLTokenizer(tokenizer.to_str(), eos_token=end_mark)
        except ValueError as error:
            raise InvalidParameter(parameter_name, f"cannot be used with this model's tokenizer: {error}") from None
        ends = [token_id for token_id in self._end_token_ids if token_id < self._vocab_size]
        return tokens, Vocabulary(self._vocab_size, ends, tokens.vocab_size, end_mark)


def compiled(asked: StructuredOutputs, tried: TrialResult, tokens: "LLTokenizer", vocabulary: Vocabulary) -> Grammar:
    """Compile the constraint *asked* for one tokenizer, after a trial in a subprocess has succeeded.

    *tried* is the result of the trial. *tokens* is llguidance's form of the tokenizer.

    Raises:
        InvalidParameter: If llguidance cannot compile it.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokens, tried.notation, log_level=0, limits=limits())
    if matcher.is_error():
        raise InvalidParameter(asked.parameter_name, f"cannot be used: {matcher.get_error()}")
    return Grammar(matcher, vocabulary, tried.num_bytes, tried.left_out)
