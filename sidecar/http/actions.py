"""Operators' actions that take a while. They run in parts, so that the tiers' thread can serve engines in between."""

import asyncio
import logging
import time
from functools import partial

from kvtier.sidecar.http.owner import Owner
from kvtier.sidecar.layout import Layout
from kvtier.web.api_error import ApiError

log = logging.getLogger(__name__)

SPILL_LOOK_S = 0.05  # polling interval
CHECK_S = 60.0  # time limit for checking one layout, during which the owner's thread does nothing else


async def spilled(owner: Owner, timeout_s: float) -> None:
    """Wait until all chunks are on disk. Raise ApiError if there is no disk, writes fail, or time runs out."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        saving = await owner.ask(owner.sidecar.saving)
        if not saving.is_there:
            raise ApiError(409, "there is no disk; start the sidecar with --disk PATH:SIZE", code="no_disk")
        if not saving.num_left:
            return
        if not saving.is_possible:
            message = f"{saving.num_left} chunks are only in host memory, because writing to the disk fails"
            raise ApiError(503, message, code="disk")
        if time.monotonic() >= give_up_at:
            message = f"{saving.num_left} chunks are not on disk after {timeout_s:g} s"
            raise ApiError(504, message, code="timeout")
        await asyncio.sleep(SPILL_LOOK_S)


async def checked(owner: Owner) -> list[Layout]:
    """Verify the bookkeeping of all layouts (models and KV formats), endpoints and pins, and return the layouts.

    Between the checks of two layouts, engines are served. Raises ApiError with the first inconsistency.
    """
    layouts = await owner.ask(lambda: [tiers.layout for tiers in owner.sidecar.layouts])
    try:
        for layout in layouts:
            await owner.ask(partial(owner.sidecar.check, layout), CHECK_S)
        await owner.ask(owner.sidecar.check_endpoints, CHECK_S)
    except AssertionError as error:
        log.error("http: the bookkeeping is inconsistent: %s", error)
        raise ApiError(500, f"the bookkeeping is inconsistent: {error}", code="check") from None
    return layouts
