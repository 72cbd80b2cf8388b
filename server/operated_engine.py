"""OperatedEngine: carries out operators' commands, such as reset, evict and pin, on a server's engine."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from kvtier.engine.core import EngineCore
from kvtier.engine.llm import encode, keyed
from kvtier.engine.stores.remote_store import remote_stays
from kvtier.server.service import Service
from kvtier.tiers.lower.purge import PurgeOrder
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS, BlockChain
from kvtier.tiers.naming.named_blocks import tenant_of
from kvtier.tiers.naming.tier import Tier
from kvtier.tiers.pins import Pin as CachePin
from kvtier.web.api_error import ApiError
from kvtier.web.api_keys import effective_salt
from kvtier.web.operating.verbs import Answer, Check, Evict, Pin, Reset, Spill, Unpin, tiers_answer, until_done

LOOK_S = 0.02  # polling interval for copies and reads in flight
COMING_S = 10.0  # maximum time that an answer waits for a pin's blocks to be loaded into host memory
MAX_PINS = 256
OWNER = "operators"  # the owner of operators' pins

_T = TypeVar("_T")


class OperatedEngine:
    """The implementation of operators' commands (`Operated`) for a server's engine. Owned by the event loop.

    The engine's thread carries out each command in parts, between the engine's steps.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._purging = asyncio.Lock()  # two purges at a time would only make both slower
        self._pins: dict[str, tuple[CachePin, float]] = {}  # pin and end time by id

    async def reset(self, asked: Reset) -> Answer:
        """Evict the selected blocks from all local tiers. If a remote tier keeps its copies, the answer says so."""
        tenant = None if asked.tenant is None else tenant_of(asked.tenant)
        tiers = frozenset(Tier)
        if asked.namespace is not None and not (await self._ask(_namespace)).startswith(asked.namespace):
            tiers = frozenset({Tier.DISK})  # only the disk has blocks of other models
        answer = await self._purged(PurgeOrder(tiers, tenant, asked.namespace))
        remote = (await self._ask(lambda core: core.config)).remote
        return answer if remote is None else {**answer, "note": remote_stays(remote.where)}

    async def evict(self, asked: Evict) -> Answer:
        """Evict the oldest blocks of one tier, as many as *asked* says."""
        tier = Tier(asked.tier)
        if tier not in (await self._ask(lambda core: core.cache.statistics())).tiers:
            raise ApiError(409, f"this server has no {tier} tier; /metrics shows its tiers", code="no_tier")
        order = PurgeOrder(frozenset({tier}), max_bytes=asked.num_bytes, max_blocks=asked.blocks)
        return await self._purged(order)

    async def spill(self, asked: Spill) -> Answer:
        """Copy each block that has no copy in a lower tier, and wait for the copies."""
        if not all(await self._ask(lambda core: core.cache.lower.status.num_slots)):
            raise ApiError(409, "there is no tier below the device; set host.capacity", code="no_tier")
        give_up_at = time.monotonic() + asked.seconds
        while num_left := await self._ask(lambda core: core.cache.drain.spill_rest()):
            if time.monotonic() >= give_up_at:
                message = f"{num_left} blocks still have no copy in a lower tier after {asked.seconds:g} s; retry"
                raise ApiError(504, message, code="timeout")
            await asyncio.sleep(LOOK_S)
        return {"left": 0}

    async def pin(self, asked: Pin) -> Answer:
        """Pin the cached blocks of a prompt in host memory. The pin replaces an earlier pin with the same id."""
        service = self._service
        lora = None if asked.model is None else service.models.lora_of(asked.model)
        salt = effective_salt(asked.tenant, asked.salt, service.is_strict)
        token_ids: Sequence[int] = asked.token_ids or ()
        if (prompt := asked.prompt) is not None:
            token_ids = await service.llm.with_tokenizer(lambda tokenizer: encode(tokenizer, prompt))

        def naming(core: EngineCore) -> Callable[[], BlockChain]:
            return partial(core.chain, token_ids, keyed(core, NO_EXTRA_KEYS, lora, salt))

        named = await self._ask(naming)
        # Hashing a long prompt must not block the engine's thread.
        chain = await service.llm.with_tokenizer(lambda _: named())

        def begin(core: EngineCore) -> CachePin | None:
            self._forget_ended(core)
            before, _ = self._pins.get(asked.pin_id, (None, 0.0))
            if before is None and len(self._pins) >= MAX_PINS:
                raise ApiError(507, f"there are {MAX_PINS} pins already, the maximum; unpin one first", code="pins")
            until = core.pins.now() + asked.seconds
            max_bytes = core.cache.pins.free_bytes + core.pins.num_bytes(OWNER)
            pin = core.pins.pin(OWNER, chain, len(token_ids), max_bytes, until=until, instead_of=before)
            if pin is not None:
                self._pins[asked.pin_id] = pin, until
            return pin

        pin = await self._ask(begin)
        if pin is None:
            message = "the prompt takes more host memory than is left for pins; unpin another prompt"
            raise ApiError(507, message, code="host_memory_full")
        await self._whole(pin)
        counts: Answer = {"tokens": len(token_ids), "bytes": pin.num_bytes, "absent": pin.num_absent}
        return {"pin": asked.pin_id, **counts}

    async def unpin(self, asked: Unpin) -> Answer:
        """End the pin with this id."""

        def end(core: EngineCore) -> bool:
            self._forget_ended(core)
            pin, _ = self._pins.pop(asked.pin, (None, 0.0))
            if pin is not None:
                core.pins.unpin(pin)
            return pin is not None

        if not await self._ask(end):
            raise ApiError(404, "there is no pin of that name, or it has ended", code="no_pin", param="pin")
        return {"pin": asked.pin}

    async def check(self, asked: Check) -> Answer:
        """Verify that the engine's internal records of blocks are consistent, one part at a time between steps."""
        verified: list[str] = []
        checks = await self._ask(lambda core: core.checks())

        def go_on(core: EngineCore) -> str | None:
            if core.has_work and not asked.now:
                message = "a check would delay the running requests; retry later, or set now to true"
                raise ApiError(409, message, code="busy", param="now")
            return next(checks, None)

        try:
            while (found := await self._ask(go_on)) is not None:
                verified.append(found)
        except AssertionError as error:
            raise ApiError(500, f"the bookkeeping is inconsistent: {error}", code="check") from None
        return {"verified": verified}

    async def _purged(self, order: PurgeOrder) -> Answer:
        async with self._purging:
            purge = await self._ask(lambda core: core.cache.purge(order))
            await until_done(lambda: self._ask(lambda core: purge.go_on()))
            answer = tiers_answer(await self._ask(lambda core: purge.outcome()))
        sidecar = (await self._ask(lambda core: core.config)).sidecar
        below = sorted(order.tiers & {Tier.HOST, Tier.DISK})
        if sidecar is not None and below:
            answer["note"] = f"{' and '.join(below)} belong to the sidecar at {sidecar}; send the request there"
        return answer

    async def _whole(self, pin: CachePin) -> None:
        """Wait, for at most `COMING_S` seconds, until all cached blocks of the pin are in host memory."""
        give_up_at = time.monotonic() + COMING_S
        num_absent = -1
        while pin.num_absent not in (0, num_absent) and time.monotonic() < give_up_at:
            num_absent = await self._ask(lambda core: pin.num_absent if not core.cache.num_in_flight else -1)
            await asyncio.sleep(LOOK_S)

    def _forget_ended(self, core: EngineCore) -> None:
        now = core.pins.now()
        self._pins = {pin_id: (pin, until) for pin_id, (pin, until) in self._pins.items() if now < until}

    async def _ask(self, question: Callable[[EngineCore], _T]) -> _T:
        try:
            answer: Awaitable[_T] = self._service.llm.ask(question)
            return await answer
        except RuntimeError as error:  # the engine ended
            raise ApiError(503, "the server ended before the request was done; retry", code="shutting_down") from error


def _namespace(core: EngineCore) -> str:
    return core.namespace.hex()
