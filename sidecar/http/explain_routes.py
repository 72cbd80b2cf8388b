"""`/v1/kvtier/explain`: explains which chunks of a prompt were found in the cache, and why the others were not."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvtier.engine.observability.explain.explainer import Explainer
from kvtier.engine.observability.explain.explanation import Explanation
from kvtier.engine.observability.explain.explanation_object import explanation_list
from kvtier.engine.observability.explain.past_requests import Past
from kvtier.sidecar.http.owner import Owner
from kvtier.sidecar.http.pin_routes import BODY, TokenIds
from kvtier.sidecar.lmcache.explained_prompt import explained_prompt
from kvtier.sidecar.lmcache.wire import MAX_SALT_CHARACTERS
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys
from kvtier.web.api_error import ApiError, json_response
from kvtier.web.paths import STATS
from kvtier.web.request_body import parse, read_body

EXPLAIN = "/v1/kvtier/explain"


class ExplainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of the `POST` request. *prompt* has token ids, because a sidecar has no tokenizer.

    If *request_id* is given, the answer explains the past lookup of that request, whose prompt must have been the same.
    Otherwise, it explains what a lookup of the prompt would find now.
    """

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    prompt: TokenIds
    cache_salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARACTERS)] = ""
    request_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None


class ExplainRoutes:
    """The handlers of the routes that explain lookups. Owned by the event loop."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._layouts = owner.sidecar.layouts

    async def request(self, request: Request) -> Response:
        """Answer `GET /v1/kvtier/explain/{id}`."""
        pasts, explainer = await self._pasts(request.path_params["id"]), self._layouts.explainer
        return _answer([] if explainer is None else await self._explained(explainer, pasts))

    async def prompt(self, request: Request) -> Response:
        """Answer `POST /v1/kvtier/explain`."""
        asked = parse(await read_body(request, BODY), ExplainRequest, (), {})
        explainer = self._layouts.explainer
        if explainer is None:
            message = "this sidecar receives no prompts; send the request to the kvtier engine that got the prompt"
            raise ApiError(404, message, code="no_endpoint")
        chain = BlockChain(explainer.block_size, ExtraKeys(cache_salt=asked.cache_salt or None))
        await asyncio.to_thread(chain.extend, asked.prompt)
        if asked.request_id is None:
            found = await self._owner.ask(lambda: explained_prompt(self._layouts, explainer, asked.model, chain))
            if not found:
                message = f"no engine of the model {asked.model[:64]!r} has attached; {STATS} lists the known models"
                raise ApiError(404, message, code="no_model", param="model")
            return _answer([await asyncio.to_thread(each.explanation) for each in found])
        pasts = await self._pasts(asked.request_id)

        def is_prompt_of_one() -> bool:
            return any(explainer.is_prompt_of(past, chain, len(asked.prompt)) for past in pasts)

        if not await asyncio.to_thread(is_prompt_of_one):
            message = "the request with this id had another prompt or salt; leave out request_id to explain this prompt"
            raise ApiError(409, message, code="other_prompt", param="prompt")
        return _answer(await self._explained(explainer, pasts))

    async def _explained(self, explainer: Explainer, pasts: Sequence[Past]) -> Sequence[Explanation]:
        """Explain one lookup after the other.

        The thread that owns the tiers collects the evidence of one lookup at a time, and serves engines in between.
        """
        found = []
        for past in pasts:
            evidence = await self._owner.ask(partial(explainer.evidence, past))
            found.append(await asyncio.to_thread(evidence.explanation))
        return found

    async def _pasts(self, request_id: str) -> Sequence[Past]:
        """Return the remembered lookups of the request with this id. Raise ApiError 404 if there are none."""
        explainer = self._layouts.explainer
        found = [] if explainer is None else await self._owner.ask(lambda: explainer.find(request_id, None))
        if not found:
            message = (
                "no lookup of that id is remembered: thousands of lookups have come since, or it was a request to one "
                "of kvtier's own engines, which explain their requests themselves"
            )
            raise ApiError(404, message, code="request_not_found")
        return found


def _answer(found: Sequence[Explanation]) -> Response:
    return json_response(explanation_list(found))
