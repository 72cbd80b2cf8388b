"""TraceContext: a span's position in a trace, as in the W3C header `traceparent`."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
Attribute = str | int | float


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The ids of a span and its trace, and whether the trace is sampled."""

    trace_id: str  # 32 hexadecimal digits, not all 0
    span_id: str  # 16 hexadecimal digits, not all 0
    is_sampled: bool

    @classmethod
    def of(cls, header: str | None) -> "TraceContext | None":
        """Parse the header; return None if it is missing or invalid according to the W3C recommendation."""
        match = _HEADER.fullmatch(header.strip()) if header else None
        if match is None:
            return None
        version, trace_id, span_id, flags, more = match.groups()
        is_void = version == "ff" or (version == "00" and more is not None) or not int(trace_id, 16) * int(span_id, 16)
        return None if is_void else cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))

    @classmethod
    def root(cls, is_sampled: bool) -> "TraceContext":
        """Create the root span of a new trace."""
        return cls(_random(16), _random(8), is_sampled)

    def child(self) -> "TraceContext":
        """Create a new span of the same trace."""
        return TraceContext(self.trace_id, _random(8), self.is_sampled)

    @property
    def header(self) -> str:
        """Value of a header `traceparent` that makes this span the parent of further spans."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"


def _random(num_bytes: int) -> str:
    return (secrets.token_bytes(num_bytes - 1) + b"\1").hex()  # never all 0


@dataclass(frozen=True, slots=True)
class Span:
    """A span of a trace. *parent_id* is None for the root span.

    Times are in seconds since the Unix epoch. No attribute contains text of a prompt or an answer.
    """

    name: str
    context: TraceContext
    parent_id: str | None
    start: float
    end: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    is_server: bool = False  # whether the span is of an answer to a request from the network
    is_failed: bool = False
    links: Sequence[TraceContext] = ()  # related spans of other traces, all of them sampled
