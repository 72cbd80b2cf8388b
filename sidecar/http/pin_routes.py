"""`/pin`: lets operators keep prompts in host memory for a while."""

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvtier.engine.config import ServerConfig, parse_bytes
from kvtier.sidecar.http.owner import Owner
from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.lmcache.hybrid_layout import AnyChunkLayout
from kvtier.sidecar.lmcache.token_keys import blocks_of_tokens
from kvtier.sidecar.lmcache.wire import MAX_SALT_CHARACTERS
from kvtier.sidecar.pins import PinnedLayout, TooManyPins
from kvtier.web.api_error import ApiError, json_response
from kvtier.web.paths import STATS
from kvtier.web.request_body import parse, read_body

BODY = ServerConfig(max_body=parse_bytes("8MiB"), body_timeout_s=20.0)  # a million token ids
MAX_S = 7 * 86_400.0
COMING_S = 10.0  # longest time that an answer waits for reads from disk
LOOK_S = 0.05  # polling interval during this wait

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
TokenIds = Annotated[list[_TokenId], msgspec.Meta(min_length=1, max_length=1 << 20)]  # more than any model's context


class PinRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The prompt to keep, and for how long: *seconds* from now, or 0 to end the pin."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    token_ids: TokenIds
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_S)]
    salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARACTERS)] = ""

    @property
    def pin_id(self) -> str:
        """Name of the pin. Equal prompts have the same name."""
        running = hashlib.sha256(msgspec.json.encode([self.model, self.salt]))
        running.update(msgspec.json.encode(self.token_ids))
        return running.hexdigest()[:16]


class PinRoutes:
    """The handlers of the routes that make and end pins. Owned by the event loop.

    Computing the names of a prompt's chunks takes a while. So it runs on another thread, and delays neither the event
    loop nor the thread that owns the tiers.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._sidecar = owner.sidecar

    async def pin(self, request: Request) -> Response:
        """Keep the cached part of a prompt in host memory, and answer once it has been read from disk."""
        if request.query_params:
            raise ApiError(400, "/pin has no query parameters; send the prompt to pin as a JSON body")
        return json_response(await self.carry_out(parse(await read_body(request, BODY), PinRequest, (), {})))

    async def carry_out(self, asked: PinRequest) -> dict[str, object]:
        """Make, renew or end the pin, and return the answer's fields. Raise ApiError if that is not possible."""
        if not asked.seconds:
            pin_id = asked.pin_id
            await self._owner.ask(lambda: self._sidecar.pins.unpin(pin_id))
            return _answer(pin_id, 0.0, [])
        sizes = {layout.chunk_tokens for layout, _ in await self._owner.ask(lambda: self._layouts(asked.model))}
        if not sizes:
            message = f"no engine of the model {asked.model[:64]!r} has attached; {STATS} lists the known models"
            raise ApiError(404, message, code="no_model", param="model")
        blocks = {size: await asyncio.to_thread(blocks_of_tokens, size, asked.salt, asked.token_ids) for size in sizes}
        pin_id = asked.pin_id

        def begin() -> None:
            found = self._layouts(asked.model)
            wanted = [(tiers, blocks[layout.chunk_tokens]) for layout, tiers in found if layout.chunk_tokens in blocks]
            self._sidecar.pins.pin(pin_id, wanted, asked.seconds)

        try:
            await self._owner.ask(begin)
        except TooManyPins as error:
            raise ApiError(507, str(error), code="pins") from None
        return _answer(pin_id, asked.seconds, await self._settled(pin_id))

    async def unpin(self, request: Request) -> Response:
        """End the pin with this name."""
        pin_id = request.query_params.get("pin", "")
        if not pin_id or len(request.query_params.multi_items()) > 1:
            why = "name the pin to end: DELETE /v1/kvtier/pin?pin=NAME; /v1/kvtier/leases lists all pins"
            raise ApiError(400, why, param="pin")
        if not await self._owner.ask(lambda: self._sidecar.pins.unpin(pin_id)):
            why = f"there is no pin {pin_id[:64]!r}; /v1/kvtier/leases lists all pins"
            raise ApiError(404, why, code="no_pin", param="pin")
        return json_response(_answer(pin_id, 0.0, []))

    async def _settled(self, pin_id: str) -> list[PinnedLayout]:
        """Wait at most `COMING_S` seconds for the pin's reads in flight, and return what the pin keeps."""
        give_up_at = time.monotonic() + COMING_S
        while True:
            found = await self._owner.ask(lambda: self._sidecar.pins.view(pin_id)) or []
            if not any(each.num_coming for each in found) or time.monotonic() >= give_up_at:
                return found
            await asyncio.sleep(LOOK_S)

    def _layouts(self, model: str) -> list[tuple[AnyChunkLayout, LayoutTiers]]:
        """Return each layout (model and KV format) of *model* that LMCache clients use, with its tiers.

        Layouts of other clients are left out, because their chunk names depend on more than tokens and salt.
        """
        every = [(tiers.layout, tiers) for tiers in self._sidecar.layouts]
        return [
            (layout, tiers) for layout, tiers in every if isinstance(layout, AnyChunkLayout) and layout.model == model
        ]


def _answer(pin_id: str, seconds: float, layouts: Sequence[PinnedLayout]) -> dict[str, object]:
    return {
        "pin": pin_id,
        "seconds": seconds,
        "num_chunks": sum(each.num_chunks for each in layouts),
        "num_tokens": min((each.num_tokens for each in layouts), default=0),
        "layouts": [{**asdict(each), "layout": each.layout.digest.hex()} for each in layouts],
    }
