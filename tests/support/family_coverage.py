"""One family of models in kvtier's engine: refused with a sentence, or compared with its own passes from every tier."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from equal_answers import push_down
from small_models import byte_tokenizer
from tiny_families import VOCAB, NotBuilt, lacks_attention_interface, reads_later_tokens, tiny_model
from transformers import PreTrainedModel
from waiting import wait_for

from kvtier import LLM, Completion, ImagePrompt, SamplingParams, UnsupportedModel
from kvtier.tiers.naming.tier import Tier

BLOCK_SIZE = 16
BATCH = (180, 131, 70)  # tokens of the three prompts; the first reaches beyond all windows of four layers
NUM_TOKENS = BATCH[0]
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)
ONE = SamplingParams(max_tokens=1, ignore_eos=True)
# Two tokens are a tie if their logits differ by less than this share of the largest logit: rounding decides.
TIE = 1e-3
MAX_ERROR = 2e-2  # largest difference of a log probability that rounding may cause
READ_TIMEOUT_S = 60.0  # of what takes milliseconds: an answer that is recomputed for being late would be a fault


class Way(StrEnum):
    """A way in which the prefix of a prompt comes to the device."""

    COLD = "cold"
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    RESTART = "restart"
    SIDECAR = "sidecar"
    BATCHED = "batched"


class Outcome(StrEnum):
    """What became of a family."""

    EQUAL = "equal"  # the model's own tokens in every way
    WRONG = "wrong"  # other tokens, or not from the tier
    REFUSED = "refused"  # with a sentence
    NOT_BUILT = "not built"  # by transformers
    FAILED = "failed"  # with an error that is no refusal, or without an end


@dataclass(frozen=True)
class Coverage:
    """What became of one family.

    *reason* is the sentence of the refusal or error. *kinds* are the kinds of attention of the layers.
    """

    family: str
    outcome: Outcome
    reason: str = ""
    kinds: Sequence[str] = ()
    faults: Mapping[str, str] = field(default_factory=dict)  # by way
    error: float = 0.0  # largest difference of a token's log probability
    num_ties: int = 0
    is_encoder: bool = False
    lacks_interface: bool = False

    @property
    def is_counted(self) -> bool:
        """Whether the family counts: it is no encoder, and has transformers' AttentionInterface if it is refused."""
        return not self.is_encoder and not (self.lacks_interface and self.outcome is not Outcome.EQUAL)


@dataclass(frozen=True)
class Answer:
    """What the engine answered to a prompt, and the tiers from which at least half of the prompt must have come."""

    way: Way
    prompt: Sequence[int]
    done: Completion
    tiers: Sequence[str] = ()

    def fault(self) -> str:
        """Return how the prompt did not come from the tiers that it should come from; empty if it did."""
        balance = self.done.tokens
        if not self.tiers:
            return "" if balance.recomputed == len(self.prompt) else f"from {balance}, not computed"
        is_from_tier = any(getattr(balance, tier) >= BLOCK_SIZE for tier in self.tiers)
        if is_from_tier and balance.recomputed <= len(self.prompt) // 2:
            return ""
        return f"from {balance}, not from {' or '.join(self.tiers)}"


def cover(family: str, folder: Path, sidecar: str) -> Coverage:
    """Return what becomes of the family, with files in the empty *folder* and the *sidecar* at that URL."""
    try:
        model = tiny_model(family)
    except NotBuilt as error:
        return Coverage(family, Outcome.NOT_BUILT, str(error))
    traits = Coverage(
        family,
        Outcome.REFUSED,
        is_encoder=reads_later_tokens(family),
        lacks_interface=lacks_attention_interface(model),
    )
    try:
        kinds, answers = _answers(family, model, folder, sidecar)
    except UnsupportedModel as error:
        return replace(traits, reason=sentence_of(error))
    faults: dict[str, str] = {}
    worst, num_ties = 0.0, 0
    for answer in answers:
        judged = judge(model, answer.prompt, answer.done)
        worst, num_ties = max(worst, judged.error), num_ties + judged.num_ties
        if fault := judged.fault or answer.fault():
            faults.setdefault(str(answer.way), fault)
    if is_insensitive(model, answers[0]):
        faults.setdefault(str(Way.COLD), "the answer is the same after another prefix, so it proves nothing")
    outcome = Outcome.WRONG if faults else Outcome.EQUAL
    return replace(traits, outcome=outcome, kinds=kinds, faults=faults, error=worst, num_ties=num_ties)


def sentence_of(error: UnsupportedModel) -> str:
    """Return the message without the name of the model's class."""
    return str(error).partition(": ")[2]


def _answers(family: str, model: PreTrainedModel, folder: Path, sidecar: str) -> tuple[Sequence[str], list[Answer]]:
    """Ask for the first prompt in every way, and for all three in one batch; also return the kinds of layers."""
    prompts = [prompt_of(seed, num_tokens) for seed, num_tokens in enumerate(BATCH)]
    prompt, answers = prompts[0], []
    device = partial(_device, seed=family)  # two types may be one model: blocks of another family would be a hit
    attached = {**device("64MiB"), "sidecar": sidecar}
    with LLM(model, attached, byte_tokenizer()) as llm:
        wait_for(lambda: is_attached(llm))
        kinds = kinds_of(llm)
        prompt_bytes = -(-NUM_TOKENS // BLOCK_SIZE) * sum(llm.core.runner.block_bytes)
        answers.append(Answer(Way.COLD, prompt, _ask(llm, prompt)))
        answers.append(Answer(Way.DEVICE, prompt, _ask(llm, prompt), ["device"]))
        num_unkept = llm.where(prompt)["nowhere"]  # a window or a state is kept at the prompt's end alone
        llm.check()
    with LLM(model, attached, byte_tokenizer()) as llm:
        wait_for(lambda: is_found(llm, prompt, num_unkept))
        answers.append(Answer(Way.SIDECAR, prompt, _ask(llm, prompt), ["host", "disk"]))
        llm.check()
    below = {
        "host": {"capacity": 3 * prompt_bytes},
        "disk": {"path": str(folder / "store"), "capacity": "256MiB", "read_timeout_s": READ_TIMEOUT_S},
    }
    with LLM(model, {**device(3 * prompt_bytes // 2), **below}, byte_tokenizer()) as llm:
        wait_for(lambda: is_disk_open(llm))
        answers.append(Answer(Way.COLD, prompt, _ask(llm, prompt)))
        push_down(llm, prompt, Tier.DEVICE, NUM_TOKENS, ONE)
        answers.append(Answer(Way.HOST, prompt, _ask(llm, prompt), ["host"]))
        push_down(llm, prompt, Tier.HOST, NUM_TOKENS, ONE)
        answers.append(Answer(Way.DISK, prompt, _ask(llm, prompt), ["disk"]))
        llm.check()
    with LLM(model, {**device(4 * prompt_bytes), **below}, byte_tokenizer()) as llm:
        wait_for(lambda: is_disk_open(llm))
        answers.append(Answer(Way.RESTART, prompt, _ask(llm, prompt), ["disk"]))
        batch = llm.generate(prompts, GREEDY, progress=False)
        tiers: list[Sequence[str]] = [["device"], [], []]
        answers += [Answer(Way.BATCHED, *each) for each in zip(prompts, batch, tiers, strict=True)]
        llm.check()
    return kinds, answers


def _device(capacity: int | str, seed: str) -> dict[str, Any]:
    return {
        "names": {"seed": seed},
        "device": {"capacity": capacity, "block_size": BLOCK_SIZE},
        "scheduler": {"prefill_chunk": 64, "token_budget": 128, "load": "always"},
    }


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """Return a prompt of varied tokens, none of them special."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(num_tokens)]


def kinds_of(llm: LLM) -> list[str]:
    """Return what the model's layers keep, each kind once: "full", "window", "chunks", "latent" rows or a "state"."""
    words = {"FullAttention": "full", "SlidingWindow": "window", "ChunkedLocal": "chunks", "RecurrentState": "state"}
    kinds = [words[type(group).__name__] for group in llm.core.runner.groups]
    if any(layer.rank for layer in llm.core.runner.layers):
        kinds = ["latent" if kind == "full" else kind for kind in kinds]
    return list(dict.fromkeys(kinds))


def _ask(llm: LLM, prompt: Sequence[int]) -> Completion:
    return llm.generate(prompt, GREEDY)[0]


def is_attached(llm: LLM) -> bool:
    """Return whether the engine's sidecar is attached."""
    sidecar = llm.statistics().sidecar
    return sidecar is not None and sidecar.is_attached


def is_disk_open(llm: LLM) -> bool:
    """Return whether the store is open and its names are known: on a busy machine that may come after the LLM."""
    disk = llm.statistics().cache.disk
    return disk is not None and disk.is_open and disk.is_indexed


def is_found(llm: LLM, prompt: Sequence[int] | ImagePrompt, num_unkept: int) -> bool:
    """Return whether all but *num_unkept* of the prompt's tokens are in some tier."""
    llm.statistics()  # which takes in what the sidecar says
    return llm.where(prompt)["nowhere"] <= num_unkept


@dataclass(frozen=True)
class Judgement:
    """What a model's own pass says of an answer. *fault* is empty if the answer is the model's own."""

    fault: str
    error: float
    num_ties: int


def judge(model: PreTrainedModel, prompt: Sequence[int], done: Completion) -> Judgement:
    """Compare each token with the likeliest one after the prompt and the tokens before it.

    The model's own pass, with its own attention and without a cache, says which token is the likeliest.
    """
    logits = plain_logits(model, [*prompt, *done.token_ids[:-1]])[len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
    gaps = (logits.max(1).values - chosen) / logits.abs().max()
    told = torch.tensor([each.logprob for each in done.logprobs])
    error = float((told - (chosen - logits.logsumexp(1))).abs().max())
    wrong = [i for i, gap in enumerate(gaps.tolist()) if not gap <= TIE]
    fault = ""
    if wrong:
        fault = f"token {wrong[0] + 1} is {done.token_ids[wrong[0]]}, not {int(logits[wrong[0]].argmax())}"
    elif not error <= MAX_ERROR:
        fault = f"log probabilities differ by {error:.1e}"
    return Judgement(fault, error, int((gaps > 0).sum()) - len(wrong))


def is_insensitive(model: PreTrainedModel, answer: Answer) -> bool:
    """Return whether the answer would also be right after other tokens in place of the prompt's full blocks."""
    num_cached = NUM_TOKENS - NUM_TOKENS % BLOCK_SIZE
    others = [*prompt_of(99, num_cached), *answer.prompt[num_cached:]]
    return not judge(model, others, answer.done).fault


def plain_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the logits of a pass with the model's own attention and without a cache, [len(token_ids), vocab]."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits
    finally:
        model.set_attn_implementation(before)
    return logits[0].float()


def failed(family: str, reason: str) -> Coverage:
    """Return the coverage of a family that could not be examined."""
    return Coverage(family, Outcome.FAILED, reason)


def coverage_from(values: Mapping[str, Any]) -> Coverage:
    """Return the coverage with the values of `dataclasses.asdict`."""
    return Coverage(**{**values, "outcome": Outcome(values["outcome"])})
