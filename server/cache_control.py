"""CacheControl: Anthropic's `cache_control`, which asks the server to keep the beginning of a prompt in the cache."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

MAX_BREAKPOINTS = 4  # Anthropic's limit
TTL_S = {"5m": 300.0, "1h": 3600.0}


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A breakpoint: a request to keep the beginning of the prompt in the cache.

    The beginning reaches to the end of the tool, the message or the part of a message that has this object.

    The prompt is kept until *ttl* (5 minutes or 1 hour) after it was last read. Anthropic's *scope*, which says who may
    read the kept prompt, is accepted and ignored.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"
    scope: Any = None

    @property
    def ttl_s(self) -> float:
        """Time to live in seconds."""
        return TTL_S[self.ttl]


def check_breakpoints(controls: Sequence[CacheControl]) -> None:
    """Raise ValueError if the breakpoints of a prompt violate Anthropic's rules.

    A prompt may have at most 4 breakpoints, and those with a ttl of 1h must come before those with a ttl of 5m.
    """
    if len(controls) > MAX_BREAKPOINTS:
        raise ValueError(f"cache_control: there are {len(controls)} breakpoints; give {MAX_BREAKPOINTS} at most")
    if [each.ttl for each in controls] != sorted((each.ttl for each in controls), key=TTL_S.__getitem__, reverse=True):
        raise ValueError("cache_control: a ttl of 1h comes after one of 5m; the longer ones must come first")
