"""Construction of a request's spans from its record."""

from kvtier.engine.observability.tracing.trace_context import Attribute, Span, TraceContext
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.timeline import Stage
from kvtier.tiers.naming.tier import Tier

REQUEST = "kvtier.request"
LOOKUP = "kvtier.lookup"  # a request's span at a sidecar, which sees the request's lookup but no other stage


def spans_of(record: RequestRecord, own: TraceContext, parent_id: str | None) -> list[Span]:
    """Return the request's *own* span, whose parent is *parent_id*, and a child span for each of its stages.

    The stages are `kvtier.lookup`, `kvtier.plan`, `kvtier.promote.disk` and so on.
    """
    start, seconds = record.arrived_at, record.total_s or record.lookup_s or 0.0
    name = LOOKUP if record.total_s is None else REQUEST
    whole = Span(name, own, parent_id, start, start + seconds, attributes_of(record))
    stages = [
        Span(
            f"kvtier.{stretch.stage.value}",
            own.child(),
            own.span_id,
            start + max(0.0, stretch.start_s),
            start + min(seconds, stretch.end_s),
            _tokens_of(stretch.stage, record),
        )
        for stretch in record.stretches
    ]
    return [whole, *stages]


def attributes_of(record: RequestRecord) -> dict[str, Attribute]:
    """Return the attributes of a request's span."""
    tokens = record.tokens
    found: dict[str, Attribute | None] = {
        "kvtier.request_id": record.request_id,
        "kvtier.tenant": record.tenant,
        "kvtier.model": record.model,
        "kvtier.tokens.prompt": tokens.num_tokens,
        **{f"kvtier.tokens.{tier.value}": getattr(tokens, tier) for tier in Tier},
        "kvtier.tokens.recomputed": tokens.recomputed,
        **{f"kvtier.recomputed.{reason.value}": number for reason, number in tokens.reasons.items() if number},
        "kvtier.tokens.generated": record.num_generated,
        "kvtier.finish_reason": record.finish_reason and str(record.finish_reason),
        "kvtier.preempted": record.num_preempted,
    }
    return {name: value for name, value in found.items() if value is not None}


def _tokens_of(stage: Stage, record: RequestRecord) -> dict[str, Attribute]:
    tokens = record.tokens
    numbers = {
        Stage.LOOKUP: tokens.num_tokens,
        Stage.PROMOTE_HOST: tokens.host,
        Stage.PROMOTE_DISK: tokens.disk,
        Stage.PROMOTE_REMOTE: tokens.remote,
        Stage.PREFILL: tokens.recomputed,
        Stage.DECODE: record.num_generated or 0,
    }
    return {"kvtier.tokens": numbers[stage]} if stage in numbers else {}
