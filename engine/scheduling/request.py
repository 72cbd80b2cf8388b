"""Request: one prompt on its way through the engine, and its completion."""

import time
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from kvtier.engine.model.drawing.sampler import Sampler
from kvtier.engine.model.drawing.token_bans import NO_BANS, TokenBans
from kvtier.engine.model.logprobs import TokenLogprobs, step_logprobs
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.model.structured.grammar import GrammarState
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.timeline import Timeline
from kvtier.engine.text.detokenizer import Detokenizer
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.tier import Reason
from kvtier.tiers.up.promotion import Tables

if TYPE_CHECKING:
    from kvtier.engine.scheduling.loading import Loading


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """One request's place in the queue and use of the cache; the defaults change nothing.

    A lower *priority* is more urgent. Without *reads_cache* all tokens are computed. At most *max_load_tokens* are
    loaded from tiers below the device.
    """

    priority: int = 0
    reads_cache: bool = True
    max_load_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int):  # the queue compares it with those of other requests
            raise ValueError(f"priority is {self.priority!r}; give a whole number, lower is more urgent")
        if self.max_load_tokens is not None and self.max_load_tokens < 0:
            raise ValueError(f"max_load_tokens is {self.max_load_tokens}; give 0 or more, or leave it out")

    @property
    def takes_all_hits(self) -> bool:
        """Whether the request loads every token that comes sooner from the cache than by computing."""
        return self.reads_cache and self.max_load_tokens is None


DEFAULT_OPTIONS = RequestOptions()


class PromptScores:
    """What the model thinks of each token of one prompt, in order. Owned by the request.

    A token is scored by the logits of the one before it; the first has none. So cached tokens are of no use, but those
    that were computed and scored before the request was preempted.
    """

    def __init__(self, token_ids: Sequence[int], num_top: int) -> None:
        """Of each of *token_ids* so many of the likeliest are told."""
        self._token_ids = token_ids
        self._num_top = num_top
        self.told: list[TokenLogprobs | None] = [None]  # of the prompt's first tokens, as many as are known

    @property
    def num_used(self) -> int:
        """The prompt's first tokens whose logits have been used."""
        return len(self.told) - 1

    @property
    def is_complete(self) -> bool:
        """Whether all of the prompt's tokens are scored."""
        return len(self.told) >= len(self._token_ids)

    def wanted(self, start: int, end: int) -> range:
        """Those of the tokens *start* to *end* of the request whose logits are still wanted."""
        return range(max(start, self.num_used), min(end, len(self._token_ids) - 1))

    def add(self, logits: torch.Tensor) -> None:
        """Score the next tokens by the *logits* `[tokens, vocab]` of those before them."""
        first = len(self.told)
        scored = self._token_ids[first : first + len(logits)]
        self.told += step_logprobs(logits, scored, [self._num_top] * len(scored))


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # the model's end token, a stop token, a stop string, or the end of its grammar
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # by its caller, or because its grammar became too costly


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt. *tokens* says where the prompt's tokens came from and adds up to the prompt."""

    text: str
    token_ids: list[int]  # those generated
    finish_reason: FinishReason
    ttft_s: float  # from the request's arrival to its first token, or to its end if it has none
    tokens: TokenBalance
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token, if they were asked for
    stop: str | None = None  # the stop string that ended it
    prompt_logprobs: list[TokenLogprobs | None] = field(
        default_factory=list
    )  # the same of the prompt's; the first: None


@dataclass(eq=False, slots=True)
class Request:
    """One prompt, its progress and its leases, which are those of `tables` and of its `loading`.

    Owned by the engine's thread.
    """

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    chain: BlockChain  # the names of the blocks of all tokens so far
    detokenizer: Detokenizer
    options: RequestOptions = DEFAULT_OPTIONS
    timeline: Timeline = field(default_factory=lambda: Timeline(time.monotonic()))
    bans: InitVar[TokenBans] = NO_BANS
    grammar: InitVar[GrammarState | None] = None
    token_ids: list[int] = field(init=False)  # the prompt, then what was generated
    sampler: Sampler = field(init=False)
    scores: PromptScores | None = field(init=False, default=None)  # None: the prompt's are not asked for
    tables: Tables = field(default_factory=list)
    num_computed: int = 0  # tokens whose keys and values are in the tables' blocks
    num_committed: int = 0  # of these, tokens whose full blocks are named in the cache
    junction: int | None = None  # tokens after which the prompt's prefix has been seen before, but not kept whole
    loading: "Loading | None" = None  # from the queue until its prefix is in the tables
    tokens: TokenBalance | None = None
    finish_reason: FinishReason | None = None
    new_text: str = ""  # since the last step
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self, bans: TokenBans, grammar: GrammarState | None) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.sampler = Sampler(self.sampling, self.prompt_token_ids, bans, grammar)
        if self.sampling.prompt_logprobs is not None:
            self.scores = PromptScores(self.prompt_token_ids, self.sampling.prompt_logprobs)

    @property
    def reads_cache(self) -> bool:
        """Whether the request takes what is cached of its prompt; one that is scored has all of it computed."""
        return self.options.reads_cache and self.scores is None

    @property
    def num_to_compute(self) -> int:
        """Tokens that are known and not computed: the prompt's rest, or the one token sampled last."""
        return len(self.token_ids) - self.num_computed

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """Of the prompt's tokens as far as it is computed, if they were asked for."""
        return [] if self.scores is None else self.scores.told

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.num_to_compute == 1 and len(self.token_ids) > len(self.prompt_token_ids)

    @property
    def generated(self) -> list[int]:
        """The tokens sampled so far."""
        return self.token_ids[len(self.prompt_token_ids) :]

    def append(self, token_id: int, end_token_ids: frozenset[int]) -> None:
        """Append the sampled token, and finish if it is the last."""
        self.timeline.on_token(time.monotonic())
        self.token_ids.append(token_id)
        self.new_text = ""
        grammar = self.sampler.grammar
        if grammar is not None and grammar.has_failed:
            self.finish(FinishReason.ABORT)
            return
        if token_id in self.sampling.stop_token_ids or (not self.sampling.ignore_eos and token_id in end_token_ids):
            self.finish(FinishReason.STOP)
            return
        self.new_text = self.detokenizer.push(token_id)
        if self.detokenizer.stopped or (grammar is not None and grammar.is_complete):
            self.finish(FinishReason.STOP)
        elif len(self.token_ids) - len(self.prompt_token_ids) >= self.sampling.max_tokens:
            self.finish(FinishReason.LENGTH)

    def finish(self, reason: FinishReason) -> None:
        """End the request; text that was held back for a possible stop string comes out."""
        self.finish_reason = reason
        self.timeline.on_ended(time.monotonic())
        self.new_text += self.detokenizer.flush()

    def completion(self) -> Completion:
        """The answer for the caller, once finished."""
        assert self.finish_reason is not None, "the request is not finished"
        ttft_s = self.timeline.ttft_s
        if ttft_s is None:  # it was aborted before, or has none
            ttft_s = time.monotonic() - self.timeline.arrived_at
        return Completion(
            self.detokenizer.text,
            self.generated,
            self.finish_reason,
            ttft_s,
            self.balance(),
            self.logprobs,
            self.detokenizer.stopped_by,
            self.prompt_logprobs,
        )

    def record(self) -> RequestRecord:
        """What the request has taken, once it has ended."""
        timeline, caller, lora = self.timeline, self.timeline.caller, self.chain.extra.lora
        assert timeline.ended_at is not None, "the request has not ended"
        return RequestRecord(
            caller.request_id,
            caller.tenant,
            None if lora is None else lora.name,
            time.time() - (time.monotonic() - timeline.arrived_at),
            self.balance(),
            len(self.generated),
            self.finish_reason,
            timeline.queue_s,
            timeline.lookup_s,
            timeline.load_s,
            timeline.ttft_s,
            timeline.ended_at - timeline.arrived_at,
            timeline.num_preempted,
            caller.traceparent,
            timeline,
        )

    def balance(self) -> TokenBalance:
        """Where the prompt's tokens came from. Of one that has ended before its prefix came all would have been
        computed."""
        num_tokens = len(self.prompt_token_ids)
        return self.tokens or TokenBalance(recomputed=num_tokens, reasons={Reason.ABORTED: num_tokens})
