"""`WeightsLineage`: a part of block names that separates blocks computed with weights that may have changed."""

import hashlib
import logging
import secrets

from kvtier.tiers.naming.block_hash import BlockName

log = logging.getLogger(__name__)


class WeightsLineage:
    """A secret in the names of an engine's blocks, in addition to the namespace with the weights at its start.

    Weights can be updated in place while an engine runs. The engine does not notify its cache, but resets it
    afterwards. A reset may have other reasons, and the cache cannot tell them apart. So every reset begins a lineage
    that no other engine can name, and the engine then finds only blocks that it has computed since. After a restart the
    engine is in the shared lineage again, because it loads the weights, and computes their digest, anew.
    """

    def __init__(self) -> None:
        """Begin in the lineage that all engines of a namespace share."""
        self.secret = b""  # empty in the shared lineage

    def start_new_lineage(self) -> None:
        """Begin a lineage of this engine's own, because its weights may have changed."""
        if not self.secret:
            log.warning(
                "kvtier: the engine has reset its cache, so its weights may have been updated; until it restarts, "
                "it finds only blocks that it computes from now on, and shares them with no other engine"
            )
        self.secret = secrets.token_bytes(32)

    def name(self, name: BlockName) -> BlockName:
        """Return the name in this lineage of the block that has *name* in the shared lineage."""
        return BlockName(hashlib.sha256(b"kvtier lineage\0" + self.secret + name).digest()) if self.secret else name
