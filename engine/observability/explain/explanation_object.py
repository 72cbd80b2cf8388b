"""The JSON objects of explanations, as structs, and their conversion from explanations."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from kvtier.engine.observability.explain.explanation import Departure, ExplainedRun, Explanation


class EvictionObject(msgspec.Struct, frozen=True):
    """The evictions of the blocks of consecutive prompt tokens, with the times of the first and the last eviction.

    *during* has the ids of requests of the prompt's tenant that ran during the evictions. If none ran, it has the id
    of this tenant's last request before the evictions.
    """

    cause: str
    first_at: float
    last_at: float
    during: list[str]


class RowObject(msgspec.Struct, frozen=True):
    """Consecutive tokens of a prompt with the same outcome: a *hit* in a tier, or *missed* for a reason."""

    start: int
    end: int
    hit: str | None
    copied: bool
    missed: str | None
    evicted: EvictionObject | None
    differs: list[str]


class DepartureObject(msgspec.Struct, frozen=True):
    """The point at which a prompt begins to differ from the most similar earlier prompt."""

    shared_tokens: int
    departs: bool
    text: str | None
    before: str | None


class ExplanationObject(msgspec.Struct, frozen=True):
    """An explanation of why the tokens of one prompt were found in the cache or not."""

    object: Literal["kvtier.explanation"]
    id: str | None
    arrived_at: float | None
    prompt_tokens: int
    block_size: int
    rows: list[RowObject]
    departure: DepartureObject | None
    notes: list[str]


class ExplanationList(msgspec.Struct, frozen=True):
    """The explanations of a request, one for each of its choices."""

    object: Literal["list"]
    data: list[ExplanationObject]


def explanation_list(explanations: Iterable[Explanation]) -> ExplanationList:
    """Return the explanations as a JSON object."""
    return ExplanationList(object="list", data=[_explanation_object(each) for each in explanations])


def _explanation_object(explanation: Explanation) -> ExplanationObject:
    return ExplanationObject(
        object="kvtier.explanation",
        id=explanation.request_id,
        arrived_at=None if explanation.arrived_at is None else round(explanation.arrived_at, 3),
        prompt_tokens=explanation.num_tokens,
        block_size=explanation.block_size,
        rows=[_row_object(row) for row in explanation.rows],
        departure=None if explanation.departure is None else _departure_object(explanation.departure),
        notes=list(explanation.notes),
    )


def _row_object(row: ExplainedRun) -> RowObject:
    evicted = None
    if row.cause is not None and row.evicted_at is not None:
        evicted = EvictionObject(
            cause=row.cause.value,
            first_at=round(row.evicted_at[0], 3),
            last_at=round(row.evicted_at[1], 3),
            during=list(row.during),
        )
    return RowObject(
        start=row.start,
        end=row.end,
        hit=None if row.tier is None else row.tier.value,
        copied=row.is_copied,
        missed=None if row.why is None else row.why.value,
        evicted=evicted,
        differs=list(row.differs),
    )


def _departure_object(departure: Departure) -> DepartureObject:
    return DepartureObject(
        shared_tokens=departure.num_shared,
        departs=departure.departs,
        text=departure.text,
        before=departure.before,
    )
