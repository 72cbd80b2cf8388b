"""doubts_of: what a run cannot tell, in sentences."""

from collections.abc import Iterable, Iterator, Sequence

from kvtier.cli.prove.families import SAME_PROMPT
from kvtier.cli.prove.judgement import UNCACHED, Row
from kvtier.cli.prove.measures import UNMEASURED_BOUND, Measures

_NO_SOONER = 0.8  # of the time of a first token that was computed as a whole


def doubts_of(measures: Measures, rows: Sequence[Row]) -> list[str]:
    """The sentences, the weightiest first."""
    return [*_of_what_was_cached(measures, rows), *_of_the_server(measures), *_of_answers(measures), *_of_time(rows)]


def _of_what_was_cached(measures: Measures, rows: Sequence[Row]) -> Iterator[str]:
    sharing = [row for row in rows if row.shares]
    lengths = sorted({row.length for row in sharing})
    without = [length for length in lengths if all(row.why == UNCACHED for row in sharing if row.length == length)]
    if without == lengths:
        yield "Nothing seems to have come from a cache."
        return
    if without:
        yield f"At {_listed(f'{length:,}' for length in without)} tokens nothing came from a cache."
    families = {row.family: None for row in sharing if row.why == UNCACHED and row.length not in without}
    if families:
        yield f"At some lengths nothing came from a cache for: {_listed(families)}."
    if not measures.evidence.is_pushed_out:
        yield (
            "Nothing pushed prompts out of the device's memory, so colder tiers may not have answered; "
            "with --evict or --between they do."
        )


def _of_the_server(measures: Measures) -> Iterator[str]:
    evidence, dialect = measures.evidence, measures.evidence.plan.controls[0].asker.dialect
    if evidence.cold is None:
        yield (
            "No way is known to have this server compute what it has cached (it heeds neither cache_salt nor "
            "cache_prompt, or caches nothing), so only a prompt that was asked twice could be compared."
        )
    if not dialect.tells_logprobs:
        yield "The server tells no log probabilities, so only the texts of answers were compared."
    elif not evidence.shapes:
        yield (
            "How far other shapes of computation move answers could not be measured, so distances of less than "
            f"{UNMEASURED_BOUND} were let pass."
        )
    if not dialect.tells_cached:
        yield (
            "The server tells no cached tokens (vLLM does with --enable-prompt-tokens-details, SGLang with "
            "--enable-cache-report), so what was cached was judged by time, and blocks of another model or salt were "
            "found by answers only."
        )
    elif not evidence.is_exact:
        yield (
            "The server takes no token ids, so prompts part at words, and blocks of another model or salt were found "
            "by answers only."
        )


def _of_answers(measures: Measures) -> Iterator[str]:
    if measures.unsteady():
        yield "Prompts that were computed as a whole have several answers: the fault is not, or not alone, the cache's."
    for length in sorted({control.length for control in measures.evidence.plan.controls}):
        if not measures.is_sensitive(length):
            yield (
                f"At {length:,} tokens answers hang on how a prompt begins hardly more than on when it is asked, so "
                "nothing is proven by them."
            )
    for pair in measures.alike:
        names = _listed(sorted(asker.name for asker in pair))
        yield f"{names} answer alike, or could not be compared: whether their blocks are kept apart is not known."


def _of_time(rows: Sequence[Row]) -> Iterator[str]:
    longest = max((row.length for row in rows), default=0)
    for row in rows:
        is_told = row.length == longest and row.family == SAME_PROMPT and row.cached_tokens
        if is_told and row.computed_ttft_s and row.ttft_s and row.ttft_s > _NO_SOONER * row.computed_ttft_s:
            yield (
                f"Of {row.length:,} tokens {row.cached_tokens:,.0f} were cached, as the server tells, but the first "
                "token came no sooner: whether they were used is not known."
            )


def _listed(names: Iterable[str]) -> str:
    *front, last = names
    return f"{', '.join(front)} and {last}" if front else last
