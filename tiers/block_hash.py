"""Names of blocks: a chained hash, so that equal names mean equal prefixes, so equal KV bytes in one namespace."""

import hashlib
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

import numpy as np
import numpy.typing as npt
import xxhash

BlockName = NewType("BlockName", bytes)
TokenIds = Sequence[int] | npt.NDArray[np.integer]


class HashAlgorithm(StrEnum):
    """`sha256` for everybody; `xxh3_128` is several times faster, and only safe where all prompts are one tenant's."""

    SHA256 = "sha256"
    XXH3_128 = "xxh3_128"


_DIGEST: dict[HashAlgorithm, Callable[[bytes], bytes]] = {
    HashAlgorithm.SHA256: lambda data: hashlib.sha256(data).digest(),
    HashAlgorithm.XXH3_128: xxhash.xxh3_128_digest,
}


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter a prompt runs with; both fields are part of every block's name."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, a sound…: *num_tokens* placeholder tokens from *offset* on whose content is *identifier*."""

    identifier: str
    offset: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What decides a block's KV beside its token ids. Order and tags are part of the name's format."""

    lora: Lora | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    cache_salt: str | None = None
    prompt_embeddings: npt.NDArray[np.generic] | None = field(default=None, compare=False)  # [num_tokens, hidden]

    def of_block(self, start: int, end: int) -> bytes:
        """The keys of the block with tokens *start* to *end*, tagged and unambiguous; empty for most blocks."""
        parts: list[bytes] = []
        if self.lora is not None:
            parts += (b"lora", _utf8(self.lora.name), _utf8(self.lora.path))
        for item in self.multimodal:
            if item.offset < end and start < item.offset + item.num_tokens:
                parts += (b"mm", _utf8(item.identifier), struct.pack("<q", item.offset - start))
        if self.cache_salt is not None and start == 0:
            parts += (b"cache_salt", _utf8(self.cache_salt))
        if self.prompt_embeddings is not None and start < len(self.prompt_embeddings):
            rows = np.ascontiguousarray(self.prompt_embeddings[start:end])
            parts += (b"prompt_embeds", hashlib.sha256(rows.tobytes()).digest())
        return b"".join(struct.pack("<I", len(part)) + part for part in parts)


NO_EXTRA_KEYS = ExtraKeys()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # a salt from a client may be any string


def root_name(algorithm: HashAlgorithm, seed: str) -> BlockName:
    """The parent of every first block. The seed is data of the namespace, never of the environment."""
    return BlockName(_DIGEST[algorithm](f"kvtier:{algorithm}:{seed}".encode()))


def hash_blocks(
    token_ids: TokenIds,
    block_size: int,
    extra: ExtraKeys = NO_EXTRA_KEYS,
    *,
    parent: BlockName,
    algorithm: HashAlgorithm = HashAlgorithm.SHA256,
    start: int = 0,
) -> list[BlockName]:
    """Name each full block of *token_ids*: `H(parent ‖ token ids as little-endian uint32 ‖ extra keys)`.

    *token_ids* begins at token *start* of the prompt (a multiple of *block_size*) and continues *parent*, which is
    `root_name(...)` for the first block. A trailing partial block has no name. Raises OverflowError for ids that do
    not fit 32 bits. Scheme: automatic prefix caching with extra keys, as vLLM's `hash_block_tokens`.
    """
    digest = _DIGEST[algorithm]
    data = _little_endian(token_ids)
    has_extra = extra != NO_EXTRA_KEYS or extra.prompt_embeddings is not None
    names: list[BlockName] = []
    width = 4 * block_size
    for offset in range(0, len(data) - width + 1, width):
        block = parent + data[offset : offset + width]
        if has_extra:
            first = start + offset // 4
            block += extra.of_block(first, first + block_size)
        parent = BlockName(digest(block))
        names.append(parent)
    return names


def _little_endian(token_ids: TokenIds) -> bytes:
    if isinstance(token_ids, np.ndarray):
        if token_ids.size and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < 1 << 32:
            raise OverflowError("token ids: need 0 <= id < 2**32")
        return token_ids.astype("<u4").tobytes()
    # array: 6 ns a token from a list, np.asarray 20. Its "I" is 32 bits, native order, on every platform we run on.
    return array("I", token_ids).tobytes()


class BlockChain:
    """The names of one growing sequence of tokens: a prompt, then what is generated after it."""

    def __init__(
        self,
        block_size: int,
        extra: ExtraKeys = NO_EXTRA_KEYS,
        *,
        algorithm: HashAlgorithm = HashAlgorithm.SHA256,
        seed: str = "kvtier",
    ) -> None:
        self.names: list[BlockName] = []
        self._block_size = block_size
        self._extra = extra
        self._algorithm = algorithm
        self._root = root_name(algorithm, seed)

    def extend(self, token_ids: TokenIds) -> None:
        """Name the blocks that *token_ids*, the whole sequence so far, has filled since the last call."""
        start = len(self.names) * self._block_size
        if len(token_ids) - start >= self._block_size:
            parent = self.names[-1] if self.names else self._root
            self.names += hash_blocks(
                token_ids[start:],
                self._block_size,
                self._extra,
                parent=parent,
                algorithm=self._algorithm,
                start=start,
            )
