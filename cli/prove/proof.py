"""A complete run of `kvtier prove`, from a server's URL to the verdict on the answers from its cache."""

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.cli.prove.cold import find_cache_bypass
from kvtier.cli.prove.dialect import NUM_TOKENS, ModelClient, learn, unless_refused
from kvtier.cli.prove.doubts import limitations_of
from kvtier.cli.prove.endpoint import Endpoint, Refused
from kvtier.cli.prove.families import CUE, PromptGenerator
from kvtier.cli.prove.judgement import Judgement, judge
from kvtier.cli.prove.measures import Measures
from kvtier.cli.prove.plan import Planner, RunSettings, Salts
from kvtier.cli.prove.prover import Prover
from kvtier.cli.prove.push_out import EvictionStep
from kvtier.cli.prove.questioner import Note
from kvtier.cli.prove.writing import WORDS, PromptFormat, TokenIds, Words

_FEW = 40  # words in a short prompt, which fits any model
_MIN_IDS = 64  # with fewer different tokens, random prompts could share a prefix by chance
LENGTHS = (200, 1000, 4000)  # tokens
MIN_LENGTH = 64
_MAX_LISTED = 4  # max number of adapters to test if the user names none
_NUM_PROBES = 3  # prompts with which to find a way to bypass the cache
_EXTRA_TOKENS = 32  # limit on tokens that a server may add around a prompt and its answer


def choose_prompt_format(asker: ModelClient) -> tuple[PromptFormat, Words]:
    """Return the format in which to send prompts, and the format for prompts that an answer's text is appended to.

    The first is token ids if the server accepts them, else text. The second is always text. If the server can tokenize,
    only token ids of English words are used.
    """
    answer = asker.ask(" ".join(WORDS[:_FEW]))
    words = Words((answer.prompt_tokens or _FEW) / _FEW)
    ids = _ids_of_words(asker.endpoint, asker.model)
    writing = TokenIds(ids) if len(ids) >= _MIN_IDS else TokenIds()
    prompt = writing.write(range(_MIN_IDS))
    taken = unless_refused(asker.ask, prompt)
    if taken is None or taken.prompt_tokens not in (None, len(prompt), len(prompt) + 1):  # 1: a start token
        return words, words
    return writing, words


def _ids_of_words(endpoint: Endpoint, model: str) -> tuple[int, ...]:
    """Return the token ids of ordinary words, or () if the server cannot tokenize.

    Tokenizes with `/tokenize`, which vLLM and llama.cpp have.
    """
    text = " ".join(WORDS)
    try:
        found = endpoint.post("/tokenize", {"model": model, "prompt": text, "content": text})
        return tuple(sorted({int(token) for token in found["tokens"][1:]}))  # the first may be a start token
    except (Refused, KeyError, TypeError, ValueError):
        return ()


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that the server lists in `/v1/models`.

    For an adapter, *parent* is its base model. It is None for other models, and if the server does not report it.
    """

    name: str
    parent: str | None
    max_tokens: int | None  # limit on a prompt with its answer; None: not reported


def list_models(endpoint: Endpoint) -> list[ListedModel]:
    """Return the models that a server lists, or an empty list if it does not list any.

    Raises OSError if no server answers, and `Refused` if the API key is rejected.
    """
    try:
        data = endpoint.get("/v1/models")["data"]
        return [ListedModel(each["id"], each.get("parent"), each.get("max_model_len")) for each in data]
    except (Refused, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, Refused) and error.status in (401, 403):
            raise
        return []


@dataclass(frozen=True)
class ProofConfig:
    """The settings of a run, as given on the command line.

    If *model* is None, the run tests the first model that the server lists. If *adapters* is None, it also tests up to
    four adapters that the server lists. *lengths* are in tokens; None means all of `LENGTHS` that the model accepts. If
    *seed* is None, every run has new prompts.
    """

    endpoint: Endpoint
    other: Endpoint | None  # a server that shares the cache
    model: str | None
    adapters: Sequence[str] | None
    lengths: Sequence[int] | None
    num_rounds: int
    concurrency: int
    push_out: EvictionStep | None
    seed: int | None


@dataclass(frozen=True)
class Proof:
    """The results of a run of `kvtier prove`. *doubts* are sentences about what the run could not determine."""

    askers: Sequence[ModelClient]
    writing: PromptFormat
    measures: Measures
    judgement: Judgement
    doubts: Sequence[str]


def prove(order: ProofConfig, note: Note) -> Proof:
    """Test the server and judge its answers. Call *note* with the progress.

    Raises ValueError if the settings in *order* do not fit the server, OSError if no server answers, and `Refused` for
    an error response.
    """
    note("asking which options the server accepts", 0, 1)
    askers, longest = _askers(order)
    asked_for = _lengths(order.lengths, longest)
    writing, words = choose_prompt_format(askers[0])
    source = random.Random(order.seed) if order.seed is not None else random.SystemRandom()
    salts = Salts(secrets.token_hex(4))
    draw = PromptGenerator(source, writing.num_pieces)
    lengths = [(length, writing.pieces_of(length)) for length in asked_for]

    note("looking for a way to bypass the server's cache", 0, 1)
    probes = [writing.write(draw.prompt(lengths[-1][1])) for _ in range(_NUM_PROBES)]
    cold = find_cache_bypass(askers[0], probes, salts.new())
    plan = Planner(askers, draw, salts, cold).plan(lengths, order.num_rounds)
    prover = Prover(plan, RunSettings(source, salts, writing, words, cold), order.concurrency, note)
    measures = Measures(prover.prove(order.push_out))
    judgement = judge(measures)
    return Proof(askers, writing, measures, judgement, limitations_of(measures, judgement.rows))


def _askers(order: ProofConfig) -> tuple[list[ModelClient], int | None]:
    """Return clients for the models under test, and the maximum number of tokens of a request, or None if unknown.

    The models are the server's model, its adapters, and the second server's model if there is a second server.
    """
    listed = list_models(order.endpoint)
    model = next((each for each in listed if order.model in (None, each.name) and each.parent is None), None)
    if model is None:
        if order.model is None:
            raise ValueError(f"{order.endpoint.url}: lists no models; give --model NAME")
        model = ListedModel(order.model, None, None)
    adapters = order.adapters
    if adapters is None:
        adapters = [each.name for each in listed if each.parent == model.name][:_MAX_LISTED]
    dialect = learn(order.endpoint, model.name)
    askers = [ModelClient(order.endpoint, model.name, "the model", dialect)]
    askers += [ModelClient(order.endpoint, name, name, dialect) for name in adapters]
    if order.other is not None:
        askers.append(ModelClient(order.other, model.name, "the other server", learn(order.other, model.name)))
    return askers, model.max_tokens


def _lengths(asked: Sequence[int] | None, longest: int | None) -> list[int]:
    """Return the lengths of prompts in tokens, shortest first.

    *asked* are the lengths that the user gave, if any. *longest* is the maximum length of a request, if known.
    """
    if longest is None:
        return sorted(asked or LENGTHS)
    limit = (longest - CUE - NUM_TOKENS - _EXTRA_TOKENS) * 8 // 9  # one family extends its prompts by an eighth
    if limit < MIN_LENGTH:
        raise ValueError(
            f"the model takes at most {longest:,} tokens, which are too few for this test; give another --model"
        )
    if asked is None:
        return [length for length in LENGTHS if length <= limit] or [limit]
    if max(asked) > limit:
        raise ValueError(f"--lengths {max(asked)}: the model takes at most {longest:,} tokens; give {limit} or less")
    return sorted(asked)
