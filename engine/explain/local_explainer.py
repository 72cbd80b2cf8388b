"""LocalExplainer: the explainer of an engine, which has one kind of blocks in tiers of its own."""

from collections.abc import Sequence

from kvtier.engine.explain.explainer import Explainer
from kvtier.engine.explain.explanation import Explanation
from kvtier.engine.records.request_record import RequestRecord
from kvtier.engine.records.trail import Trail
from kvtier.tiers.device.ghosts import Ghosts
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.tier import Tier


class LocalExplainer:
    """See `Explainer`. *ghosts* are of the engine's tiers. Owned by the engine's thread."""

    def __init__(self, explainer: Explainer, ghosts: Ghosts) -> None:
        self._explainer = explainer
        self._ghosts = ghosts

    def on_ended(self, record: RequestRecord, trail: Trail, chain: BlockChain) -> None:
        """Remember a request that has ended."""
        self._explainer.on_ended(record, trail, chain, self._ghosts)

    def explain(self, request_id: str, tenant: str | None, same_messages: Sequence[str] = ()) -> list[Explanation]:
        """Why the prompts of the request were found or not, see `Explainer.explain`."""
        return self._explainer.explain(request_id, tenant, same_messages)

    def explain_now(
        self,
        trail: Trail,
        chain: BlockChain,
        tiers: Sequence[Tier | None],
        num_tokens: int,
        tenant: str | None,
        same_messages: Sequence[str] = (),
    ) -> Explanation:
        """What would be found of a prompt now, see `Explainer.explain_now`."""
        return self._explainer.explain_now(
            trail, chain, self._ghosts, tiers, num_tokens, tenant, same_messages=same_messages
        )

    def is_prompt_of(self, request_id: str, chain: BlockChain, num_tokens: int, tenant: str | None) -> bool:
        """Whether the request had this very prompt."""
        return self._explainer.is_prompt_of(request_id, chain, num_tokens, tenant)

    def close(self) -> None:
        """Write what was seen, for the next process to explain more."""
        self._explainer.close()
