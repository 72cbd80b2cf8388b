"""The verdicts of a run: one for each family and length of prompts, and one for the whole run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from kvtier.cli.prove.cold import are_cached
from kvtier.cli.prove.evidence import Asked
from kvtier.cli.prove.measures import Measures
from kvtier.cli.prove.plan import Question

UNCACHED = "nothing was cached"


class Verdict(StrEnum):
    """The outcome of one row of the report, or of the whole run."""

    PROVEN = "proven"
    WRONG = "wrong"
    UNPROVEN = "unproven"


@dataclass(frozen=True, slots=True)
class ProofRow:
    """The results for one kind of prompt pair (*family*, such as "half shared") and one length.

    Times are medians over prompts that were sent alone.
    """

    family: str
    length: int
    num_asked: int
    cached_tokens: float | None  # median; None: not reported by the server
    computed_ttft_s: float | None  # TTFT of the same prompts in a full prefill
    ttft_s: float | None
    apart: float | None  # max distance of an answer to its closest reference; None: nothing was compared
    shares: bool  # whether cached blocks of the earlier prompts may serve the later ones
    verdict: Verdict
    why: str  # why the verdict is UNPROVEN, else empty


@dataclass(frozen=True, slots=True)
class Finding:
    """A wrong answer, or cached tokens that the server must not have used.

    *asked* is the request with the wrong answer or the wrong number of cached tokens. If it was the request for the
    later prompt of a `Question` (a pair of prompts), *question* is that pair. Otherwise *question* is None.
    """

    what: str
    asked: Asked
    question: Question | None


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a run. It is PROVEN if nothing is wrong and at least one answer from a cache was compared."""

    verdict: Verdict
    rows: tuple[ProofRow, ...]
    findings: tuple[Finding, ...]


def judge(measures: Measures) -> Judgement:
    """Return the verdict on a run, with the wrong answers found."""
    findings = tuple(_findings(measures))
    wrong = {finding.asked for finding in findings}
    groups: dict[tuple[int, str], list[tuple[Question, Asked]]] = {}
    for question, asked in measures.evidence.later:
        groups.setdefault((question.length, question.family), []).append((question, asked))
    rows = tuple(_row(measures, group, wrong) for group in groups.values())
    verdict = Verdict.UNPROVEN
    if findings:
        verdict = Verdict.WRONG
    elif any(row.verdict is Verdict.PROVEN and row.shares for row in rows):
        verdict = Verdict.PROVEN
    return Judgement(verdict, rows, findings)


def _findings(measures: Measures) -> Iterator[Finding]:
    for asked, apart in measures.unsteady():
        yield Finding(f"answers to full prefills of this prompt differ by {apart:.2g}", asked, None)
    questions = {asked: question for question, asked in measures.evidence.later}
    for asked in measures.suspects():
        apart = measures.apart(asked) or 0.0
        is_text = not asked.request.asker.dialect.tells_logprobs
        what = "the text differs from answers without the cache" if is_text else f"the answer is off by {apart:.2g}"
        yield Finding(what, asked, questions[asked])
    for asked in measures.evidence.asked:
        if excess := measures.excess(asked):
            what = f"{asked.answer.cached_tokens:,} tokens were cached, {excess:,} more than earlier prompts share"
            yield Finding(what, asked, questions.get(asked))


def _row(measures: Measures, group: Sequence[tuple[Question, Asked]], wrong: set[Asked]) -> ProofRow:
    question, asked = group[0][0], [one for _, one in group]
    alone = [one for one in asked if one.is_alone]
    prompts = {(one.request.asker, one.request.pieces): None for one in alone}
    computed = [one for key in prompts for one in measures.references(*key) if one.is_alone]
    computed = computed or measures.computed_alone(question.length)
    told = [one.answer.cached_tokens for one in asked if one.answer.cached_tokens is not None]
    timed = asked if told else alone
    apart = [each for one in asked if (each := measures.apart(one)) is not None]
    verdict, why = Verdict.PROVEN, ""
    if wrong.intersection(asked):
        verdict = Verdict.WRONG
    elif question.shares and not are_cached([one.answer for one in timed], [one.answer for one in computed]):
        verdict, why = Verdict.UNPROVEN, UNCACHED
    elif not apart:
        verdict, why = Verdict.UNPROVEN, "nothing to compare with"
    elif not measures.is_sensitive(question.length):
        verdict, why = Verdict.UNPROVEN, "answers hardly differ"
    return ProofRow(
        question.family,
        question.length,
        len(asked),
        median(told) if told else None,
        median(one.answer.ttft_s for one in computed) if computed else None,
        median(one.answer.ttft_s for one in alone) if alone else None,
        max(apart, default=None),
        question.shares,
        verdict,
        why,
    )
