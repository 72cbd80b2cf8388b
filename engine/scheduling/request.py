"""Requests: the state of one prompt in the engine, and its completion."""

import time
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from kvtier.engine.images.engine_images import ImageUse
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
from kvtier.tiers.naming.retention import QUESTION_TOKENS
from kvtier.tiers.naming.tier import Reason
from kvtier.tiers.up.promotion import Tables

if TYPE_CHECKING:
    from kvtier.engine.scheduling.loading import Loading


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The priority of a request and how it may use the cache.

    A lower *priority* is more urgent. Without *reads_cache*, all tokens are computed. At most *max_load_tokens* are
    loaded from tiers below the device; None means no limit.
    """

    priority: int = 0
    reads_cache: bool = True
    max_load_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int):  # the queue compares it with those of other requests
            raise ValueError(f"priority is {self.priority!r}; give a whole number (lower is more urgent)")
        if self.max_load_tokens is not None and self.max_load_tokens < 0:
            raise ValueError(f"max_load_tokens is {self.max_load_tokens}; give 0 or more, or leave it out")

    @property
    def takes_all_hits(self) -> bool:
        """True if these options put no limit on what the request loads from the cache."""
        return self.reads_cache and self.max_load_tokens is None


DEFAULT_OPTIONS = RequestOptions()


class PromptScores:
    """Log-probabilities of one prompt's tokens, for a request that asked for them. Owned by the request.

    The logits for a token come from the token before it, so the first token has no score. The cache holds no logits. So
    the request cannot use cached tokens, except those that it scored itself before it was preempted.
    """

    def __init__(self, token_ids: Sequence[int], num_top: int) -> None:
        """Begin with no token scored. For each position, the *num_top* likeliest tokens are reported, too."""
        self._token_ids = token_ids
        self._num_top = num_top
        self.told: list[TokenLogprobs | None] = [None]  # scores of the prompt's first tokens, as far as known

    @property
    def num_used(self) -> int:
        """Number of tokens, from the prompt's beginning, whose logits are no longer needed."""
        return len(self.told) - 1

    @property
    def is_complete(self) -> bool:
        """True if all of the prompt's tokens are scored."""
        return len(self.told) >= len(self._token_ids)

    def wanted(self, start: int, end: int) -> range:
        """Return the positions from *start* to *end* - 1 whose logits are still needed to score the prompt."""
        return range(max(start, self.num_used), min(end, len(self._token_ids) - 1))

    def add(self, logits: torch.Tensor) -> None:
        """Score the prompt's next tokens. Row i of *logits* `[tokens, vocab]` predicts the i-th of them."""
        first = len(self.told)
        scored = self._token_ids[first : first + len(logits)]
        self.told += step_logprobs(logits, scored, [self._num_top] * len(scored))


class FinishReason(StrEnum):
    """The reason why a request ended."""

    STOP = "stop"  # the model's end token, a stop token, a stop string, or the end of its grammar
    LENGTH = "length"  # max_tokens was reached
    ABORT = "abort"  # the caller aborted the request, or its grammar became too costly


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """The answer to one prompt. *tokens* counts the prompt's tokens by the tier that they came from."""

    text: str
    token_ids: list[int]  # generated tokens only
    finish_reason: FinishReason
    ttft_s: float  # from the request's arrival to its first token, or to its end if it has none
    tokens: TokenBalance
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each generated token, if requested
    stop: str | None = None  # the stop string that ended the request
    # Log-probabilities of the prompt's tokens, if requested; None for the first.
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def __repr__(self) -> str:
        answer = f"{len(self.token_ids)} tokens, finish_reason={self.finish_reason}, ttft_s={self.ttft_s:.3f}"
        return f"<Completion {self.text!r}: {answer}; prompt: {self.tokens}>"


@dataclass(eq=False, slots=True)
class Request:
    """A request in the engine: its prompt, its progress, and its leases on device slots.

    The leases are held by `tables` and, while the cached prefix is being loaded, by `loading`. Owned by the engine's
    thread.
    """

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    chain: BlockChain  # names of the blocks of all tokens so far
    detokenizer: Detokenizer
    options: RequestOptions = DEFAULT_OPTIONS
    timeline: Timeline = field(default_factory=lambda: Timeline(time.monotonic()))
    bans: InitVar[TokenBans] = NO_BANS
    grammar: InitVar[GrammarState | None] = None
    token_ids: list[int] = field(init=False)  # the prompt, then the generated tokens
    sampler: Sampler = field(init=False)
    scores: PromptScores | None = field(init=False, default=None)  # None: prompt logprobs were not requested
    tables: Tables = field(default_factory=list)
    num_computed: int = 0  # tokens whose keys and values are in the tables' blocks
    num_committed: int = 0  # computed tokens whose full blocks are named in the cache
    # Ends of prefixes that earlier or waiting prompts share. A cached one that is longer than the hit cannot be used
    # yet, because groups that forget blocks (such as sliding windows) lack those at its end. Once this request has
    # computed these blocks, they are kept.
    junctions: set[int] = field(default_factory=set)
    images: ImageUse | None = None  # None once the request has ended, so that its images can be freed
    loading: "Loading | None" = None  # set from the queue until the prefix is in the tables
    tokens: TokenBalance | None = None
    finish_reason: FinishReason | None = None
    new_text: str = ""  # text since the last step
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self, bans: TokenBans, grammar: GrammarState | None) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.sampler = Sampler(self.sampling, self.prompt_token_ids, bans, grammar)
        if self.sampling.prompt_logprobs is not None:
            self.scores = PromptScores(self.prompt_token_ids, self.sampling.prompt_logprobs)

    @property
    def reads_cache(self) -> bool:
        """True if the request uses blocks that earlier requests computed.

        False if prompt logprobs were requested, because the cache holds no logits.
        """
        return self.options.reads_cache and self.scores is None

    @property
    def num_to_compute(self) -> int:
        """Number of known tokens not yet computed: the rest of the prompt, or the token sampled last."""
        return len(self.token_ids) - self.num_computed

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """Log-probabilities of the first tokens of the prompt, as far as computed; empty if not requested."""
        return [] if self.scores is None else self.scores.told

    @property
    def boundaries(self) -> list[int]:
        """Positions of the prompt at which later prompts may resume; see `Retention.kept`.

        They are the prompt's end, a position before a question at its end, and the junctions.
        """
        prompt_end = len(self.prompt_token_ids) - 1
        return [prompt_end, max(0, prompt_end - QUESTION_TOKENS), *self.junctions]

    @property
    def is_decoding(self) -> bool:
        """True if the prompt is computed, so that only the token sampled last is left to compute."""
        return self.num_to_compute == 1 and len(self.token_ids) > len(self.prompt_token_ids)

    @property
    def generated(self) -> list[int]:
        """Tokens sampled so far."""
        return self.token_ids[len(self.prompt_token_ids) :]

    def append(self, token_id: int, end_token_ids: frozenset[int]) -> None:
        """Append a sampled token, and finish the request if this token ends it."""
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
        """End the request and release the text that was held back for a possible stop string."""
        self.finish_reason = reason
        self.images = None
        self.timeline.on_ended(time.monotonic())
        self.new_text += self.detokenizer.flush()

    def completion(self) -> Completion:
        """Return the completion of a finished request."""
        assert self.finish_reason is not None, "the request is not finished"
        ttft_s = self.timeline.ttft_s
        if ttft_s is None:  # it was aborted before its first token, or generated none
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
        """Return the record of an ended request."""
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
        """Return how many of the prompt's tokens came from each tier, and why the others were computed.

        If the request ended before its prefix was loaded, all tokens count as recomputed with the reason ABORTED.
        """
        num_tokens = len(self.prompt_token_ids)
        return self.tokens or TokenBalance(recomputed=num_tokens, reasons={Reason.ABORTED: num_tokens})
