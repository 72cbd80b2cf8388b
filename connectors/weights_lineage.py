"""`WeightsLineage`: keeps blocks of weights that may have changed apart from all other blocks."""

import hashlib
import logging
import secrets

from kvtier.tiers.naming.block_hash import BlockName

log = logging.getLogger(__name__)


class WeightsLineage:
    """What the names of an engine's blocks depend on besides its namespace, which says which weights it started with.

    Weights can be updated in place while an engine runs. The engine does not tell its cache, but resets it afterwards.
    A reset may have other reasons, and nothing tells them apart. So every reset begins a lineage that no other engine
    can name: from then on the engine finds only what it has computed since. After a restart it is in the shared
    lineage again, because the weights are loaded, and their digest taken, anew.
    """

    def __init__(self) -> None:
        """Begin in the lineage that all engines of a namespace share."""
        self.secret = b""  # empty in the shared lineage

    def begin_anew(self) -> None:
        """Begin a lineage of this engine's own, because its weights may be others from now on."""
        if not self.secret:
            log.warning(
                "kvtier: the engine has reset its cache, so its weights may have been updated; until it is restarted "
                "it finds only blocks that it computes from now on, and shares them with no other engine"
            )
        self.secret = secrets.token_bytes(32)

    def name(self, name: BlockName) -> BlockName:
        """Return the name in this lineage of the block that is *name* in the shared one."""
        return BlockName(hashlib.sha256(b"kvtier lineage\0" + self.secret + name).digest()) if self.secret else name
