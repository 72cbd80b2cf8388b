"""RequestOptions: what a caller asks of the queue and of the cache for one request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """One request's place in the queue and use of the cache; the defaults change nothing.

    A lower *priority* is more urgent. Without *reads_cache* all tokens are computed. At most *max_load_tokens* are
    loaded from tiers below the device.
    """

    priority: int = 0
    reads_cache: bool = True
    max_load_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int):  # the queue compares it with those of other requests
            raise ValueError(f"priority is {self.priority!r}; give a whole number, lower is more urgent")
        if self.max_load_tokens is not None and self.max_load_tokens < 0:
            raise ValueError(f"max_load_tokens is {self.max_load_tokens}; give 0 or more, or leave it out")

    @property
    def takes_all_hits(self) -> bool:
        """Whether the request loads every token that comes sooner from the cache than by computing."""
        return self.reads_cache and self.max_load_tokens is None


DEFAULT_OPTIONS = RequestOptions()
