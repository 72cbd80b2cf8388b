"""Conversion of explanations to JSON objects."""

from collections.abc import Mapping

from kvtier.engine.observability.explain.explanation import Departure, Explanation, Row


def explanation_object(explanation: Explanation) -> dict[str, object]:
    """Return the explanation as a JSON object."""
    return {
        "object": "kvtier.explanation",
        "id": explanation.request_id,
        "arrived_at": None if explanation.arrived_at is None else round(explanation.arrived_at, 3),
        "prompt_tokens": explanation.num_tokens,
        "block_size": explanation.block_size,
        "rows": [_row_object(row) for row in explanation.rows],
        "departure": None if explanation.departure is None else _departure_object(explanation.departure),
        "notes": list(explanation.notes),
    }


def _row_object(row: Row) -> Mapping[str, object]:
    evicted = None
    if row.cause is not None and row.evicted_at is not None:
        evicted = {
            "cause": row.cause.value,
            "first_at": round(row.evicted_at[0], 3),
            "last_at": round(row.evicted_at[1], 3),
            "during": list(row.during),
        }
    return {
        "start": row.start,
        "end": row.end,
        "hit": None if row.tier is None else row.tier.value,
        "copied": row.is_copied,
        "missed": None if row.why is None else row.why.value,
        "evicted": evicted,
        "differs": list(row.differs),
    }


def _departure_object(departure: Departure) -> Mapping[str, object]:
    return {
        "shared_tokens": departure.num_shared,
        "departs": departure.departs,
        "text": departure.text,
        "before": departure.before,
    }
