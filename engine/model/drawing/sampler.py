"""Sampler: what the draws of one request depend on beside its logits."""

import random
from collections.abc import Sequence
from functools import cached_property

from kvtier.engine.model.drawing.token_bans import NO_BANS, TokenBans
from kvtier.engine.model.drawing.token_counts import TokenCounts
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.model.structured.grammar import GrammarState


class Sampler:
    """Random numbers, bans, counts of tokens and the grammar of one request, which owns it.

    They follow from its parameters and its tokens, so that other requests do not change what it draws, nor does a
    prompt that was cached.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        bans: TokenBans = NO_BANS,
        grammar: GrammarState | None = None,
    ) -> None:
        """Takes over the state of its *grammar*, if it has one."""
        self.params = params
        self.grammar = grammar
        # One number per token, drawn on the host: unlike a torch.Generator's, a seed means the same on CPU and GPU.
        self._random = random.Random(params.seed)
        self._prompt_token_ids = prompt_token_ids
        self._bans = bans
        self._output: list[int] = []

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.params.temperature == 0

    def cuts(self, vocab_size: int) -> bool:
        """Whether some tokens of so many may be cut off before a draw."""
        params = self.params
        return params.top_p < 1 or 0 < params.top_k < vocab_size or params.min_p > 0

    @cached_property
    def counts(self) -> TokenCounts | None:
        """The tokens that penalties fall on; None without penalties."""
        params = self.params
        if params.repetition_penalty != 1:
            return TokenCounts(self._prompt_token_ids)
        return TokenCounts(()) if params.presence_penalty or params.frequency_penalty else None

    @property
    def changes_logits(self) -> bool:
        """Whether bias, penalties, bans or a grammar may change the logits."""
        return bool(self.params.logit_bias or self._bans or self.counts is not None or self.grammar is not None)

    def banned(self) -> list[int]:
        """The token ids that must not be drawn next."""
        return list(self._bans.after(self._output))

    def number(self) -> float:
        """The random number of the next draw, 0 to 1 without 1."""
        return self._random.random()

    def on_drawn(self, token_id: int) -> None:
        """Take note of the token that was drawn."""
        if self.changes_logits:
            self._output.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)
        if self.grammar is not None:
            self.grammar.on_drawn(token_id)
