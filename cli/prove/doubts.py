"""Sentences for the report of a run, about what the run could not determine."""

from collections.abc import Iterable, Iterator, Sequence

from kvtier.cli.prove.families import SAME_PROMPT
from kvtier.cli.prove.judgement import UNCACHED, ProofRow
from kvtier.cli.prove.measures import UNMEASURED_BOUND, Measures

_NO_SOONER = 0.8  # a TTFT above this fraction of the full prefill's TTFT does not indicate a cache hit


def limitations_of(measures: Measures, rows: Sequence[ProofRow]) -> list[str]:
    """Return sentences about what the run could not determine, most important first."""
    return [*_of_what_was_cached(measures, rows), *_of_the_server(measures), *_of_answers(measures), *_of_time(rows)]


def _of_what_was_cached(measures: Measures, rows: Sequence[ProofRow]) -> Iterator[str]:
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
    if not measures.evidence.was_evicted:
        yield (
            "No prompts were evicted from device memory, so lower tiers may not have been tested; "
            "use --evict or --between to test them."
        )


def _of_the_server(measures: Measures) -> Iterator[str]:
    evidence, dialect = measures.evidence, measures.evidence.plan.controls[0].asker.dialect
    if evidence.cold is None:
        yield (
            "No known way makes this server recompute a cached prompt (it ignores cache_salt and cache_prompt, or "
            "caches nothing), so only prompts that were sent twice could be compared."
        )
    if not dialect.tells_logprobs:
        yield "The server returns no log probabilities, so only the texts of answers were compared."
    elif not evidence.shapes:
        yield (
            "The effect of other computation shapes on answers could not be measured, so distances below "
            f"{UNMEASURED_BOUND} were accepted."
        )
    if not dialect.tells_cached:
        yield (
            "The server reports no cached tokens (vLLM does with --enable-prompt-tokens-details, SGLang with "
            "--enable-cache-report), so cache hits were inferred from times, and blocks of another model or salt could "
            "be detected only by wrong answers."
        )
    elif not evidence.is_exact:
        yield (
            "The server accepts no token ids, so prompts differ by whole words, and blocks of another model or salt "
            "could be detected only by wrong answers."
        )


def _of_answers(measures: Measures) -> Iterator[str]:
    if measures.unsteady():
        yield "Answers differ between full prefills of one prompt: the fault is not, or not only, in the cache."
    for length in sorted({control.length for control in measures.evidence.plan.controls}):
        if not measures.is_sensitive(length):
            yield (
                f"At {length:,} tokens answers vary with the beginning of the prompt hardly more than between repeats "
                "of one prompt, so they prove nothing; use a model that was trained on text, because models with "
                "random or computed weights, such as the demo's, ignore most of a prompt."
            )
    for pair in measures.alike:
        names = _listed(sorted(asker.name for asker in pair))
        yield f"{names} answer alike, or could not be compared, so it is unknown whether their blocks are separate."


def _of_time(rows: Sequence[ProofRow]) -> Iterator[str]:
    longest = max((row.length for row in rows), default=0)
    for row in rows:
        is_told = row.length == longest and row.family == SAME_PROMPT and row.cached_tokens
        if is_told and row.computed_ttft_s and row.ttft_s and row.ttft_s > _NO_SOONER * row.computed_ttft_s:
            yield (
                f"For prompts of {row.length:,} tokens the server reports {row.cached_tokens:,.0f} cached tokens, but "
                "the first token came no sooner, so it is unknown whether the cache was used."
            )


def _listed(names: Iterable[str]) -> str:
    *front, last = names
    return f"{', '.join(front)} and {last}" if front else last
