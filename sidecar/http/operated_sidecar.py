"""OperatedSidecar: carries out operators' verbs, such as evict and pin, on a sidecar."""

import asyncio

from kvtier.engine.stores.remote_store import remote_stays
from kvtier.sidecar.http.actions import checked, spilled
from kvtier.sidecar.http.owner import Owner
from kvtier.sidecar.http.pin_routes import PinRequest, PinRoutes
from kvtier.tiers.lower.purge import PurgeOrder
from kvtier.tiers.naming.named_blocks import tenant_of
from kvtier.tiers.naming.tier import Tier
from kvtier.web.api_error import ApiError
from kvtier.web.operating.verbs import Answer, Check, Evict, Pin, Reset, Spill, Unpin, tiers_answer, until_done

BELOW = frozenset({Tier.HOST, Tier.DISK})


class OperatedSidecar:
    """A sidecar on which operators' verbs are carried out, see `Operated`. Owned by the event loop.

    The thread that owns the tiers does the work of each verb in parts, and serves engines in between.
    """

    def __init__(self, owner: Owner, pins: PinRoutes) -> None:
        self._owner = owner
        self._sidecar = owner.sidecar
        self._pins = pins
        self._purging = asyncio.Lock()  # two concurrent evictions would only slow each other down

    async def reset(self, asked: Reset) -> Answer:
        """Evict the selected blocks of all engines, attached or not, from host memory and disk.

        A remote tier keeps its blocks. The answer says so.
        """
        tenant = None if asked.tenant is None else tenant_of(asked.tenant)
        answer = await self._purged(PurgeOrder(BELOW, tenant, asked.namespace))
        remote = self._sidecar.remote_where
        return answer if remote is None else {**answer, "note": remote_stays(remote)}

    async def evict(self, asked: Evict) -> Answer:
        """Evict the oldest blocks of one tier."""
        tier = Tier(asked.tier)
        is_there = tier is Tier.HOST or (tier is Tier.DISK and (await self._owner.ask(self._sidecar.saving)).is_there)
        if not is_there:
            raise ApiError(409, f"there is no {tier} tier here; /v1/kvtier/tiers lists the tiers", code="no_tier")
        order = PurgeOrder(frozenset({tier}), max_bytes=asked.num_bytes, max_blocks=asked.blocks)
        return await self._purged(order)

    async def spill(self, asked: Spill) -> Answer:
        """Wait until everything in host memory is also on disk."""
        await spilled(self._owner, asked.seconds)
        return {"left": 0}

    async def pin(self, asked: Pin) -> Answer:
        """Keep the cached part of a prompt in host memory."""
        if asked.model is None or asked.token_ids is None:
            what = "token_ids" if asked.token_ids is None else "model"
            message = f"{what} is missing; a sidecar needs model and token_ids, because it has no tokenizer"
            raise ApiError(400, message, param=what)
        salt = asked.salt or asked.tenant or ""
        answer = await self._pins.carry_out(PinRequest(asked.model, asked.token_ids, asked.seconds, salt))
        return {name: answer[name] for name in ("pin", "num_chunks", "num_tokens")}

    async def unpin(self, asked: Unpin) -> Answer:
        """End a pin."""
        if not await self._owner.ask(lambda: self._sidecar.pins.unpin(asked.pin)):
            raise ApiError(404, "there is no pin of that name, or it has ended", code="no_pin", param="pin")
        return {"pin": asked.pin}

    async def check(self, asked: Check) -> Answer:
        """Verify the bookkeeping, one layout at a time."""
        if not asked.now and any(client.leases for client in await self._owner.ask(self._sidecar.clients)):
            raise ApiError(
                409,
                "engines are loading or storing, and a check would delay them; retry later, or set now to true",
                code="busy",
                param="now",
            )
        layouts = await checked(self._owner)
        return {
            "verified": [*(f"layout {each.digest.hex()}, of {each.model}" for each in layouts), "endpoints and pins"]
        }

    async def _purged(self, order: PurgeOrder) -> Answer:
        async with self._purging:
            purge = await self._owner.ask(lambda: self._sidecar.layouts.purge(order))
            await until_done(lambda: self._owner.ask(purge.go_on))
            return tiers_answer(await self._owner.ask(purge.outcome))
