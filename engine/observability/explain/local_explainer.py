"""LocalExplainer: the explainer of an engine, which has one namespace, unlike a sidecar."""

from collections.abc import Sequence

from kvtier.engine.observability.explain.evidence import Evidence
from kvtier.engine.observability.explain.explainer import Explainer
from kvtier.engine.observability.explain.past_requests import Past
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.trail import Trail
from kvtier.tiers.device.ghosts import Ghosts
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.tier import Tier


class LocalExplainer:
    """An `Explainer` for one engine. Owned by the engine's thread.

    *ghosts* is the record of the blocks that the engine's tiers have evicted.
    """

    def __init__(self, explainer: Explainer, ghosts: Ghosts) -> None:
        self._explainer = explainer
        self._ghosts = ghosts

    def on_ended(self, record: RequestRecord, trail: Trail, chain: BlockChain) -> None:
        """Remember a finished request."""
        self._explainer.on_ended(record, trail, chain, self._ghosts)

    def find(self, request_id: str, tenant: str | None) -> list[Past]:
        """Return the requests with this id, see `Explainer.find`."""
        return self._explainer.find(request_id, tenant)

    def evidence(self, past: Past, same_messages: Sequence[str] = ()) -> Evidence:
        """Return the evidence of why the prompt of a request was a hit or a miss, see `Explainer.evidence`."""
        return self._explainer.evidence(past, same_messages)

    def evidence_now(
        self,
        trail: Trail,
        chain: BlockChain,
        tiers: Sequence[Tier | None],
        num_tokens: int,
        tenant: str | None,
        same_messages: Sequence[str] = (),
    ) -> Evidence:
        """Return the evidence of why a prompt would be a hit or a miss now, see `Explainer.evidence_now`."""
        return self._explainer.evidence_now(
            trail, chain, self._ghosts, tiers, num_tokens, tenant, same_messages=same_messages
        )

    def is_prompt_of(self, past: Past, chain: BlockChain, num_tokens: int) -> bool:
        """Return whether the request had exactly this prompt. Any thread may call this."""
        return self._explainer.is_prompt_of(past, chain, num_tokens)

    def close(self) -> None:
        """Save the digests of prompts for the next process."""
        self._explainer.close()
