"""Sampler: the sampling state of one request, such as its random numbers and banned tokens."""

import random
from collections.abc import Sequence
from functools import cached_property

from kvtier.engine.model.drawing.token_bans import NO_BANS, TokenBans
from kvtier.engine.model.drawing.token_counts import TokenCounts
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.model.structured.grammar import GrammarState


class Sampler:
    """The state that sampling needs besides logits: one request's random numbers, bans, token counts and grammar.

    This state depends only on the request's parameters and tokens. So the sampled tokens depend neither on other
    requests nor on cache hits.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        bans: TokenBans = NO_BANS,
        grammar: GrammarState | None = None,
    ) -> None:
        """Create the sampler, which takes ownership of *grammar*."""
        self.params = params
        self.grammar = grammar
        # Gives one number per token. It runs on the host, so that a seed gives the same numbers for CPU and GPU, unlike
        # with torch.Generator.
        self._random = random.Random(params.seed)
        self._prompt_token_ids = prompt_token_ids
        self._bans = bans
        self._output: list[int] = []

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always chosen (temperature 0)."""
        return self.params.temperature == 0

    def cuts(self, vocab_size: int) -> bool:
        """Return whether top-p, top-k or min-p may remove tokens of a vocabulary of *vocab_size*."""
        params = self.params
        return params.top_p < 1 or 0 < params.top_k < vocab_size or params.min_p > 0

    @cached_property
    def counts(self) -> TokenCounts | None:
        """Counts of the tokens that penalties apply to; None without penalties."""
        params = self.params
        if params.repetition_penalty != 1:
            return TokenCounts(self._prompt_token_ids)
        return TokenCounts(()) if params.presence_penalty or params.frequency_penalty else None

    @property
    def changes_logits(self) -> bool:
        """True if bias, penalties, bans or a grammar may change the logits."""
        return bool(self.params.logit_bias or self._bans or self.counts is not None or self.grammar is not None)

    def banned(self) -> list[int]:
        """Return the token ids that must not be sampled next."""
        return list(self._bans.after(self._output))

    def number(self) -> float:
        """Return the random number for the next token, from 0 inclusive to 1 exclusive."""
        return self._random.random()

    def on_drawn(self, token_id: int) -> None:
        """Record the sampled token."""
        if self.changes_logits:
            self._output.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)
        if self.grammar is not None:
            self.grammar.on_drawn(token_id)
