"""GenerationRequest: the request parameters that `/v1/completions` and `/v1/chat/completions` have in common."""

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.model.sampling_defaults import SamplingDefaults
from kvtier.engine.model.structured.structured_outputs import StructuredOutputs
from kvtier.engine.scheduling.request import RequestOptions
from kvtier.server.logged_once import LoggedOnce
from kvtier.server.response_format import (
    Choices,
    JsonSchema,
    ResponseFormat,
    StructuredOutputsParam,
    as_structured_outputs,
)

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_TTL_S = 30 * 86400.0
MAX_BIASES = 1024
MAX_STOPS = 64  # code editors send the first words of a programming language's statements
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
_SEEDS = 1 << 64

# Parameters of OpenAI, vLLM and Open WebUI that do not affect the answer: any value is accepted and ignored.
IGNORED = frozenset(
    {
        "background_tasks",
        "chat_id",
        "features",
        "guided_decoding_backend",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "stream_interval",  # number of tokens in a chunk of a stream
        "user",
        "variables",
    }
)
# Parameters that would change the answer, with the values that change nothing: any other value is refused.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "detokenize": (True,),
    "chat_template": (),
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}

_Number = TypeVar("_Number", int, float)
TokenCount: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
BadWord: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
LogprobCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]
MAX_CHARACTERS = 40  # of a field's name in the log

log = logging.getLogger(__name__)
unknown_fields = LoggedOnce()
ignored_parameters = LoggedOnce()


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The object `stream_options` of a request.

    With *include_usage*, the last chunk has the token usage. With *continuous_usage_stats* in addition, each chunk has
    the usage so far. *include_obfuscation* pads chunks, to hide the lengths of tokens from eavesdroppers. Its default
    is false, unlike in OpenAI's API, because a loopback connection has no eavesdroppers.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class KvtierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The object `kvtier` of a request: parameters that OpenAI's API does not have."""

    skip_reading_prefix_cache: bool = False
    max_load_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    document: str | None = None  # id of a document whose tokens precede the prompt; for completions only
    pin: bool = False  # keep the prompt in host memory for *ttl_s* after the answer
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL_S)] | None = None

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not self.pin:
            raise ValueError("ttl_s: applies only to a pinned prompt; set pin to true as well")


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of completions and chats. A parameter that is left out gets the model's default, or else OpenAI's.

    OpenAI's API does not have *kvtier*, nor these parameters of vLLM: *cache_salt*, *priority* (lower is more urgent),
    *truncate_prompt_tokens* (number of tokens to use from the prompt's end; -1: as many as fit), *top_k*, *min_p*,
    *repetition_penalty*, *min_tokens*, *bad_words*, *stop_token_ids*, *ignore_eos*, *prompt_logprobs*,
    *structured_outputs*, and the older *guided_json*, *guided_regex*, *guided_choice* and *guided_grammar*.
    """

    model: str
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None  # OpenAI's default is 1
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[int, float], msgspec.Meta(max_length=MAX_BIASES)] = {}
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    bad_words: Annotated[list[BadWord], msgspec.Meta(max_length=MAX_BAD_WORDS)] = []
    seed: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] = 1
    stop: str | Annotated[list[str], msgspec.Meta(max_length=MAX_STOPS)] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Text | None = None
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    prompt_logprobs: LogprobCount | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParam | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    kvtier: KvtierOptions = KvtierOptions()

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: stream is false; set stream to true, or leave stream_options out")
        if self.stream and self.prompt_logprobs is not None:  # as in vLLM
            raise ValueError("prompt_logprobs: not available in a stream; leave it out, or set stream to false")
        if self.truncate_prompt_tokens is not None and self.kvtier.document is not None:
            raise ValueError("truncate_prompt_tokens: cannot be combined with kvtier.document; leave one of them out")

    @property
    def chunk_options(self) -> StreamOptions:
        """Options of a stream's chunks: the request's `stream_options`, or the defaults if it has none."""
        return self.stream_options or StreamOptions()

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of top log probabilities to return for each generated token; None: no log probabilities."""
        raise NotImplementedError

    def truncated_length(self, limit: int) -> int | None:
        """Return how many tokens to use from the end of a prompt; None: all. If the request says -1, return *limit*."""
        asked = self.truncate_prompt_tokens
        return limit if asked == -1 else asked or None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of top log probabilities to compute for each prompt token; None: no log probabilities."""
        return self.prompt_logprobs

    @property
    def covers_prompt(self) -> bool:
        """True if the answer contains an entry for each token of the prompt, so its size grows with the prompt."""
        return self.prompt_logprobs is not None

    @property
    def options(self) -> RequestOptions:
        """Options for the engine: the request's priority, and its limits on the use of cached blocks."""
        return RequestOptions(self.priority, not self.kvtier.skip_reading_prefix_cache, self.kvtier.max_load_tokens)

    @property
    def structured(self) -> StructuredOutputs | None:
        """Format that the answer's text must have; None: any text. Raises `InvalidParameter` for an invalid format."""
        guided = {
            kind: getattr(self, kind) for kind in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        }
        return as_structured_outputs(self.response_format, self.structured_outputs, guided)

    def sampling(
        self, choice: int, max_tokens: int, defaults: SamplingDefaults, structured: StructuredOutputs | None
    ) -> SamplingParams:
        """Return the sampling parameters of a choice.

        Args:
            choice: Number of the choice among those of one prompt, from 0. It is added to the seed.
            max_tokens: Maximum number of tokens to generate.
            defaults: The model's values for parameters that the request leaves out.
            structured: Format that the text must have; None: any text.

        Raises:
            InvalidParameter: The parameters cannot be combined.
        """
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_first(self.temperature, defaults.temperature, 1.0),
            top_p=_first(self.top_p, defaults.top_p, 1.0),
            top_k=max(0, _first(self.top_k, defaults.top_k, 0)),
            min_p=_first(self.min_p, defaults.min_p, 0.0),
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty, 1.0),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
            bad_words=self.bad_words,
            seed=None if self.seed is None else (self.seed + choice) % _SEEDS,
            stop=[text for text in ([self.stop] if isinstance(self.stop, str) else self.stop) if text],
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=self.num_top_logprobs,
            prompt_logprobs=None if choice else self.num_prompt_logprobs,  # all choices have the same prompt
            structured_outputs=structured,
        )


def _first(asked: _Number | None, of_model: _Number | None, otherwise: _Number) -> _Number:
    if asked is not None:
        return asked
    return otherwise if of_model is None else of_model


def log_unknown_fields(names: Iterable[str], place: str = "messages") -> None:
    """Log the *names* of unknown fields in the objects at *place* of a request.

    Each name is logged once per process and place, and at most `MAX_NAMES` lines in all.
    """
    told = {f"{place}: ignoring the unknown field {name[:MAX_CHARACTERS]!r}" for name in names}
    for line in unknown_fields.new(told):
        log.info(line)


def log_ignored_parameters(content: Mapping[str, object], ignored: Collection[str]) -> None:
    """Log the parameters in *content*, a request, that are *ignored*: the name of each once per process."""
    there = {name for name in ignored if content.get(name) is not None}
    for name in ignored_parameters.new(there):
        log.info("request: ignoring the parameter %r, which has no effect here", name)
