"""Names of the blocks of vLLM's requests."""

import hashlib
from collections.abc import Sequence

from kvtier.connectors.vllm_connector.vllm_request import VllmRequest
from kvtier.tiers.naming.block_hash import BlockName

NO_ADAPTER = bytes(32)


class RequestNames:
    """The names under which one request's blocks are stored. A block without a vLLM hash has no name yet.

    A name combines vLLM's hash with the digest of the LoRA adapter's weights, because vLLM hashes only the adapter's
    name. A block that covers several hashes gets its name from the last one.
    """

    def __init__(self, request: VllmRequest, adapter_digest: bytes, hash_tokens: int, lineage: bytes = b"") -> None:
        """Create the names of *request*.

        vLLM has one hash for every *hash_tokens* tokens. *lineage* is the `secret` of the engine's `WeightsLineage`,
        a part of all names that changes when the weights may have changed.
        """
        self._request = request
        self._hash_tokens = hash_tokens
        self._start = hashlib.sha256(b"kvtier vllm block\0" + adapter_digest + lineage)
        self._names: list[BlockName] = []

    def num_blocks(self, block_size: int) -> int:
        """Return how many blocks of *block_size* tokens have a name so far: those that vLLM has hashed completely."""
        return len(self._request.block_hashes) * self._hash_tokens // block_size

    def of(self, block_size: int, start: int, end: int) -> Sequence[BlockName]:
        """Return the names of the request's blocks *start* to *end* - 1, which must have names.

        A block has *block_size* tokens.
        """
        step = block_size // self._hash_tokens
        for block_hash in self._request.block_hashes[len(self._names) : end * step]:
            running = self._start.copy()
            running.update(block_hash)
            self._names.append(BlockName(running.digest()))
        return self._names[(start + 1) * step - 1 : end * step : step]
