"""Names of the blocks of vLLM's requests."""

import hashlib
from collections.abc import Sequence

from kvtier.connectors.vllm_connector.vllm_request import VllmRequest
from kvtier.tiers.naming.block_hash import BlockName

NO_ADAPTER = bytes(32)


class RequestNames:
    """The names of one request's blocks, as far as vLLM has hashed them: each is made of vLLM's hash and of the digest
    of the adapter's weights, whose name alone vLLM hashes. A block of a group is named by the last of the hashes in
    it."""

    def __init__(self, request: VllmRequest, adapter_digest: bytes, hash_tokens: int, lineage: bytes = b"") -> None:
        """Name the blocks of *request*.

        Args:
            hash_tokens: Number of tokens for which vLLM has a hash each.
            lineage: The secret of the engine's `WeightsLineage`.
        """
        self._request = request
        self._hash_tokens = hash_tokens
        self._start = hashlib.sha256(b"kvtier vllm block\0" + adapter_digest + lineage)
        self._names: list[BlockName] = []

    def num_blocks(self, block_size: int) -> int:
        """Blocks of that size that have a name."""
        return len(self._request.block_hashes) * self._hash_tokens // block_size

    def of(self, block_size: int, start: int, end: int) -> Sequence[BlockName]:
        """The names of blocks *start* to before *end* of that size, all of which have one."""
        step = block_size // self._hash_tokens
        for block_hash in self._request.block_hashes[len(self._names) : end * step]:
            running = self._start.copy()
            running.update(block_hash)
            self._names.append(BlockName(running.digest()))
        return self._names[(start + 1) * step - 1 : end * step : step]
