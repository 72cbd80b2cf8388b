"""The verbs (commands of operators) with their arguments, and the protocol of servers that carry them out."""

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Literal, Protocol

import msgspec

from kvtier.engine.config import parse_bytes
from kvtier.tiers.lower.purge import Purged
from kvtier.tiers.naming.tier import Tier

PAUSE_S = 0.002  # pause between two parts of a verb, so that the tiers' thread can do its other work
MAX_PINNED_S = 7 * 86_400.0
MAX_WAITED_S = 600.0

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Prompt = Annotated[str, msgspec.Meta(min_length=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAITED_S)]

Answer = dict[str, object]


async def until_done(go_on: Callable[[], Awaitable[bool]]) -> None:
    """Call *go_on* until it returns True. Pause between the calls, so that the tiers' thread can do other work."""
    while not await go_on():
        await asyncio.sleep(PAUSE_S)


class Verb(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator's command. Its fields are the arguments."""

    def told(self) -> Answer:
        """Return the arguments to write to the audit log, without the prompt and the salt."""
        return {name: value for name, value in msgspec.to_builtins(self).items() if value not in (None, False)}


class Reset(Verb, frozen=True, kw_only=True):
    """An operator's command that evicts blocks from all tiers except the remote tier.

    It evicts the blocks of one *tenant*, the blocks of one *namespace*, or *all* blocks. The first digits of a
    namespace's name are enough.
    """

    tenant: _Text | None = None
    namespace: str | None = None
    all: bool = False

    def __post_init__(self) -> None:
        if (self.tenant is not None) + (self.namespace is not None) + self.all != 1:
            raise ValueError("tenant: give exactly one of the arguments tenant, namespace and all")
        if self.namespace is not None and re.fullmatch("[0-9a-f]{2,32}", self.namespace) is None:
            raise ValueError("namespace: give the beginning of its name, 2 to 32 hexadecimal digits")


class Evict(Verb, frozen=True, kw_only=True):
    """An operator's command that evicts the oldest blocks of one *tier*, up to a number of *bytes* or *blocks*."""

    tier: Literal["device", "host", "disk"]
    bytes: int | str | None = None
    blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] | None = None

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.blocks is None):
            raise ValueError("bytes: give exactly one of the arguments bytes and blocks")
        if self.bytes is not None and not self.num_bytes:
            raise ValueError("bytes: 0 bytes would evict nothing; give more")

    @property
    def num_bytes(self) -> int | None:
        """Number of bytes to evict, or None if a number of blocks is given."""
        if self.bytes is None:
            return None
        try:
            return int(parse_bytes(self.bytes))
        except ValueError as error:
            raise ValueError(f"bytes: {error}") from None


class Spill(Verb, frozen=True, kw_only=True):
    """An operator's command that copies to a lower tier all blocks that are in no lower tier yet.

    It waits up to *seconds* for the copies.
    """

    seconds: _Seconds = 60.0


class Pin(Verb, frozen=True, kw_only=True):
    """An operator's command that keeps the cached blocks of a prompt in host memory for *seconds*.

    *model* is the name of a model or adapter of this server. For a sidecar it is the model of an attached engine.
    *tenant* and *salt* must be the same as in the requests that use the prompt.
    """

    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_PINNED_S)]
    prompt: _Prompt | None = None
    token_ids: Annotated[list[_TokenId], msgspec.Meta(min_length=1)] | None = None
    model: _Text | None = None
    tenant: _Text | None = None
    salt: _Text | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.token_ids is None):
            raise ValueError("prompt: give either prompt or token_ids")

    @property
    def pin_id(self) -> str:
        """Name of the pin. Pins with the same prompt, model, tenant and salt have the same name."""
        content = [self.model, self.tenant, self.salt, self.prompt, self.token_ids]
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]

    def told(self) -> Answer:
        sizes = {"characters": self.prompt and len(self.prompt), "tokens": self.token_ids and len(self.token_ids)}
        told = {"seconds": self.seconds, "model": self.model, "tenant": self.tenant, **sizes}
        return {name: value for name, value in told.items() if value is not None}


class Unpin(Verb, frozen=True, kw_only=True):
    """An operator's command that ends a pin. *pin* is the pin's name, from the response to the command `pin`."""

    pin: _Text


class Check(Verb, frozen=True, kw_only=True):
    """An operator's command that verifies that the server's internal records of blocks are consistent.

    The check delays running requests. So while requests run, the check is refused unless *now* is true.
    """

    now: bool = False


class LogLevel(Verb, frozen=True, kw_only=True):
    """An operator's command that sets the *level* of a *logger*, such as `kvtier` or `kvtier.tiers`."""

    level: Literal["debug", "info", "warning", "error"]
    logger: Annotated[str, msgspec.Meta(max_length=256)] = "kvtier"

    def __post_init__(self) -> None:
        if re.fullmatch(r"kvtier(\.[a-z_]+)*", self.logger) is None:
            raise ValueError("logger: give kvtier, or a logger below it such as kvtier.tiers")


KINDS: Mapping[str, type[Verb]] = {
    "reset": Reset,
    "evict": Evict,
    "spill": Spill,
    "pin": Pin,
    "unpin": Unpin,
    "check": Check,
    "log-level": LogLevel,
}


class Operated(Protocol):
    """A server that carries out operators' commands. Each method returns the response, or raises `ApiError`."""

    async def reset(self, asked: Reset) -> Answer: ...

    async def evict(self, asked: Evict) -> Answer: ...

    async def spill(self, asked: Spill) -> Answer: ...

    async def pin(self, asked: Pin) -> Answer: ...

    async def unpin(self, asked: Unpin) -> Answer: ...

    async def check(self, asked: Check) -> Answer: ...


def tiers_answer(outcome: Mapping[Tier, Purged]) -> Answer:
    """Return the response to a reset or evict: the counts of evicted blocks for each tier."""
    tiers: Answer = {}
    for tier, purged in outcome.items():
        counts: Answer = {"blocks": purged.num_blocks, "bytes": purged.num_bytes, "leased": purged.num_leased}
        tiers[tier.value] = counts | ({"why_not": purged.why_not} if purged.why_not else {})
    return {"tiers": tiers}
