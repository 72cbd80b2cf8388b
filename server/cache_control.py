"""CacheControl: Anthropic's `cache_control` of a part of a prompt, which keeps the prompt up to that part."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

MAX_BREAKPOINTS = 4  # Anthropic's limit
TTL_S = {"5m": 300.0, "1h": 3600.0}


class CacheControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to keep the prompt up to the end of this part, until *ttl* (5 minutes or 1 hour) after its last read.

    Anthropic's *scope*, which says who may read the kept prompt, is accepted and ignored.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"
    scope: Any = None

    @property
    def ttl_s(self) -> float:
        """Time to live in seconds."""
        return TTL_S[self.ttl]


def check_breakpoints(controls: Sequence[CacheControl]) -> None:
    """Raise ValueError if a prompt has more than 4 breakpoints, or one with the ttl 1h after one with the ttl 5m."""
    if len(controls) > MAX_BREAKPOINTS:
        raise ValueError(f"cache_control: there are {len(controls)} breakpoints; give {MAX_BREAKPOINTS} at most")
    if [each.ttl for each in controls] != sorted((each.ttl for each in controls), key=TTL_S.__getitem__, reverse=True):
        raise ValueError("cache_control: a ttl of 1h comes after one of 5m; the longer ones must come first")
