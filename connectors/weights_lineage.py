"""`WeightsLineage`: a secret in block names, so that blocks from before a possible weight update are not found."""

import hashlib
import logging
import secrets

from kvtier.tiers.naming.block_hash import BlockName

log = logging.getLogger(__name__)


class WeightsLineage:
    """A secret that is part of an engine's block names, and changes when the engine's weights may have changed.

    The namespace of blocks contains only the digest of the weights at the engine's start. Weights can be updated in
    place while the engine runs. The engine does not notify its cache of an update, but resets the cache afterwards. A
    reset may have other reasons, and the cache cannot tell them apart.

    So every reset begins a new lineage: from then on, the names of the engine's blocks contain a new random secret,
    which no other engine has. The engine then finds only blocks that it has computed since the reset. After a restart,
    block names contain no secret again, because the engine loads the weights and computes their digest anew.
    """

    def __init__(self) -> None:
        """Create a lineage that leaves block names unchanged, so that all engines of a namespace share blocks."""
        self.secret = b""  # empty until the first reset

    def start_new_lineage(self) -> None:
        """Give all blocks other names from now on, because the engine's weights may have changed.

        The new names contain a new random secret, so blocks from before are not found.
        """
        if not self.secret:
            log.warning(
                "kvtier: the engine has reset its cache, so its weights may have been updated; until it restarts, it "
                "reuses only blocks that it computes from now on, and shares no blocks with other engines"
            )
        self.secret = secrets.token_bytes(32)

    def name(self, name: BlockName) -> BlockName:
        """Return *name* hashed with the lineage's random secret, or *name* itself before the first new lineage."""
        return BlockName(hashlib.sha256(b"kvtier lineage\0" + self.secret + name).digest()) if self.secret else name
