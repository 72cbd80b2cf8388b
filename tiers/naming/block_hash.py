"""Block names: a running hash over the prompt, so that equal names mean equal prefixes and therefore equal KV bytes."""

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import index
from typing import NewType, Protocol, Self, cast

import cbor2
import numpy as np
import numpy.typing as npt

from kvtier.tiers.naming.request_text import check_text

BlockName = NewType("BlockName", bytes)
TokenIds = Sequence[int] | npt.NDArray[np.integer]
ExtraKey = tuple[str | int | bytes, ...]  # a tag, then its values


class HashAlgorithm(StrEnum):
    """Hash algorithm of block names.

    `sha256_cbor` computes the same names as vLLM, for routers that compute vLLM's names themselves. It takes over ten
    times as long as `sha256`. Both are cryptographic, because a block is identified by its name alone: a client that
    found two prompts with equal names could make the engine use the blocks of one prompt for the other.
    """

    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"

    @property
    def default_seed(self) -> str:
        """Seed used if none is configured. It is part of the namespace and never read from the environment."""
        return "vllm-none-hash" if self is HashAlgorithm.SHA256_CBOR else "kvtier"


class _Hasher(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> BlockName: ...
    def copy(self) -> Self: ...


# Every digest is a name. Converting each one with BlockName() would take a fifth of the time, hence the cast.
_sha256 = cast("Callable[[bytes], _Hasher]", hashlib.sha256)


@dataclass(frozen=True, slots=True)
class Lora:
    """The LoRA adapter of a prompt, which is part of each block's name. Raises ValueError if a field is not text."""

    name: str
    path: str

    def __post_init__(self) -> None:
        check_text("the name of a lora", self.name)
        check_text("the path of a lora", self.path)


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image or audio item, which takes *num_tokens* placeholder tokens of the prompt from token *offset* on.

    *identifier* stands for the item's content; items with different content must have different identifiers.

    Raises ValueError if *identifier* is not text or a number is out of range.
    """

    identifier: str
    offset: int
    num_tokens: int

    def __post_init__(self) -> None:
        check_text("the identifier of a multimodal item", self.identifier)
        for what in ("offset", "num_tokens"):
            number = getattr(self, what)
            if not isinstance(number, int) or not 0 <= number < 1 << 32:
                raise ValueError(f"the {what} of a multimodal item is {number!r}; give a number from 0 to 2**32 - 1")


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """The properties of a prompt, besides its token ids, that determine its KV data or isolate it from others.

    The order and the tags of the keys are part of a block's name. Raises ValueError if the salt is not text or the
    embeddings contain Python objects. This check makes the request fail early, before an engine step names its blocks.
    """

    lora: Lora | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    cache_salt: str | None = None
    prompt_embeddings: npt.NDArray[np.generic] | None = field(default=None, compare=False)  # [num_tokens, hidden]

    def __post_init__(self) -> None:
        if self.cache_salt is not None:
            check_text("cache_salt", self.cache_salt)
        if self.prompt_embeddings is not None and np.asarray(self.prompt_embeddings).dtype.hasobject:
            raise ValueError(
                "prompt_embeddings contains Python objects, whose bytes are memory addresses; give an array of numbers"
            )

    @property
    def end(self) -> int:
        """Token position at which the extra keys end: blocks that start there or later have none."""
        ends = [item.offset + item.num_tokens for item in self.multimodal]
        ends.append(0 if self.prompt_embeddings is None else len(self.prompt_embeddings))
        ends.append(0 if self.cache_salt is None else 1)
        return max(ends) if self.lora is None else sys.maxsize

    def keys_of_block(self, start: int, end: int) -> tuple[ExtraKey, ...] | None:
        """Return the extra keys of the block with tokens *start* to *end* - 1, usually None.

        Each key is a tuple of a tag and its values, as in vLLM.
        """
        keys: list[ExtraKey] = []
        if self.lora is not None:
            keys.append(("lora", self.lora.name, self.lora.path))
        for item in self.multimodal:
            if item.offset < end and start < item.offset + item.num_tokens:
                keys.append(("mm", item.identifier, item.offset - start))
        if self.cache_salt is not None and start == 0:
            keys.append(("cache_salt", self.cache_salt))
        if self.prompt_embeddings is not None and start < len(self.prompt_embeddings):
            rows = np.ascontiguousarray(self.prompt_embeddings[start:end])
            keys.append(("prompt_embeds", hashlib.sha256(rows.tobytes()).digest()))
        return tuple(keys) or None

    def of_block(self, start: int, end: int) -> bytes:
        """Return the result of `keys_of_block` as bytes; empty if the block has no extra keys.

        Each part is prefixed by its length, so that the encoding is unambiguous.
        """
        encoded = b""
        for key in self.keys_of_block(start, end) or ():
            for part in key:
                if isinstance(part, str):
                    data = part.encode()
                else:
                    data = part if isinstance(part, bytes) else struct.pack("<q", part)
                encoded += struct.pack("<I", len(data)) + data
        return encoded


NO_EXTRA_KEYS = ExtraKeys()


class BlockChain:
    """The block names of one growing token sequence: a prompt and the tokens generated after it.

    `sha256`: a block's name is the value of a running hash after the block's tokens. The hash's input is the *root*, a
    digest of the algorithm and the seed, and then the token ids of each full block as little-endian uint32. A block
    with extra keys (see `ExtraKeys`) starts a new hash. The new hash's input is a constant tag, the name of the parent
    (the block before), the length of the keys, the keys, and then the token ids from this block on.

    The input of `sha256` is unambiguous. It begins with the tag or with the root, and the root does not begin with the
    tag. Every part has a fixed or a stated length. The parent's name identifies everything before the block.

    `sha256_cbor`: a name is `sha256(cbor((parent, token ids, extra keys or None)))`, byte for byte as in vLLM 0.33.
    """

    def __init__(
        self,
        block_size: int,
        extra: ExtraKeys = NO_EXTRA_KEYS,
        *,
        algorithm: HashAlgorithm = HashAlgorithm.SHA256,
        seed: str | None = None,
    ) -> None:
        self.names: list[BlockName] = []
        self.token_ids: TokenIds = []  # the sequence last passed to `extend`, not a copy
        self._named_ids = array("I")
        self.block_size = block_size
        self.extra = extra
        self._algorithm = algorithm
        self._num_keyed = -(-extra.end // block_size)  # blocks that may have extra keys
        seed = algorithm.default_seed if seed is None else seed
        if algorithm is HashAlgorithm.SHA256_CBOR:
            root = cbor2.dumps(seed, canonical=True)
        else:
            root = f"kvtier:2:{algorithm}:{seed}".encode()  # 2 is the version of the naming scheme
        self.root = _sha256(root).digest()
        self._hasher = _sha256(self.root)

    def extend(self, token_ids: TokenIds) -> None:
        """Name the blocks that have become full since the last call. *token_ids* is the whole sequence so far.

        A partial block at the end gets no name. Raises OverflowError if an id does not fit in 32 bits; then no block is
        named.
        """
        size, start, end = self.block_size, len(self.names), len(token_ids) // self.block_size
        self.token_ids = token_ids
        if start < end:
            ids = _little_endian(token_ids[start * size : end * size])
            self.names += self._cbor(ids) if self._algorithm is HashAlgorithm.SHA256_CBOR else self._running(ids)
            self._named_ids.frombytes(ids.tobytes())

    def cut(self, num_blocks: int) -> None:
        """Truncate the chain to its first *num_blocks* blocks, so that other tokens can follow.

        The remaining names are kept. For 131,072 tokens this takes 0.6 ms, while computing the names again would take
        1.7 ms. A chain made by `copy.copy` can be cut without changing the original.
        """
        self.names = self.names[:num_blocks]
        self._named_ids = self._named_ids[: num_blocks * self.block_size]
        self.token_ids = self._named_ids
        keyed = [block_id for block_id in range(min(num_blocks, self._num_keyed)) if self._keys(block_id)]
        first = keyed[-1] if keyed else 0
        self._hasher = self._keyed(self.parent(first), self._keys(first)) if keyed else _sha256(self.root)
        self._hasher.update(self._named_ids[first * self.block_size :].tobytes())

    def parent(self, block_id: int) -> BlockName:
        """Return the name of the block before *block_id*; for the first block, the root."""
        return self.names[block_id - 1] if block_id else self.root

    def names_of(self, block_size: int, blocks: range) -> list[BlockName]:
        """Return the names of *blocks*, which are indices of blocks with *block_size* tokens each.

        *block_size* is a multiple of the chain's block size. Each such block covers several blocks of the chain, and
        has the name of the last of them.
        """
        step = block_size // self.block_size
        if step == 1:
            return self.names[blocks.start : blocks.stop] if len(blocks) < len(self.names) else self.names
        return self.names[(blocks.start + 1) * step - 1 : blocks.stop * step : step]

    def named_ids(self, start: int, end: int) -> npt.NDArray[np.uint32]:
        """Return the token ids of the full blocks *start* to *end* - 1, shape [(end - start) * block_size]."""
        return np.frombuffer(self._named_ids[start * self.block_size : end * self.block_size], np.uint32)

    def continued_keys(self, start: int, end: int) -> Sequence[bytes]:
        """Return for each block from *start* to *end* - 1 a key that identifies its prefix; see `continued_key`."""
        if start >= self._num_keyed and start:
            return self.names[start - 1 : end - 1]
        num_keyed = max(start, self._num_keyed, 1)  # at least 1, because the first block's key is not a block name
        keys = [self.continued_key(block_id) for block_id in range(start, min(num_keyed, end))]
        return keys + self.names[start + len(keys) - 1 : end - 1]

    def continued_key(self, block_id: int) -> bytes:
        """Return a key that depends only on the prefix before the block and on the block's extra keys.

        It does not depend on the block's own tokens and is as long as a name. A partial block at the end of the
        sequence has such a key too.
        """
        parent = self.parent(block_id)
        if block_id < self._num_keyed and (keys := self._keys(block_id)):
            return self._keyed(parent, keys).digest()
        return parent

    def tail_name(self, num_tokens: int) -> BlockName:
        """Return a name for the partial last block of the first *num_tokens* tokens. No full block has such a name."""
        block_id = num_tokens // self.block_size
        token_ids = np.asarray(self.token_ids[block_id * self.block_size : num_tokens], "<u4")
        return _sha256(b"kvtier:tail:" + self.continued_key(block_id) + token_ids.tobytes()).digest()

    def _keys(self, block_id: int) -> bytes:
        return self.extra.of_block(block_id * self.block_size, (block_id + 1) * self.block_size)

    def _keyed(self, parent: bytes, keys: bytes) -> _Hasher:
        return _sha256(b"kvtier:extra:" + parent + struct.pack("<Q", len(keys)) + keys)

    def _running(self, ids: npt.NDArray[np.uint32]) -> list[BlockName]:
        names: list[BlockName] = []
        start = len(self.names)
        parent = self.parent(start)
        # As bytes objects, because hashing slices of the array would take 14 ns per token instead of 12.
        blocks = ids.view(f"V{4 * self.block_size}").tolist()
        num_keyed = max(0, self._num_keyed - start)
        hasher = self._hasher.copy()  # so that an exception leaves the chain unchanged

        for block_id, block in enumerate(blocks[:num_keyed], start):
            if keys := self._keys(block_id):
                hasher = self._keyed(parent, keys)
            hasher.update(block)
            parent = hasher.digest()
            names.append(parent)
        digest = hasher.digest
        names += [digest() for _ in map(hasher.update, blocks[num_keyed:])]

        self._hasher = hasher
        return names

    def _cbor(self, ids: npt.NDArray[np.uint32]) -> list[BlockName]:
        names: list[BlockName] = []
        parent = self.parent(len(self.names))
        for block_id, block in enumerate(ids.reshape(-1, self.block_size).tolist(), len(self.names)):
            keys = self.extra.keys_of_block(block_id * self.block_size, (block_id + 1) * self.block_size)
            parent = BlockName(hashlib.sha256(cbor2.dumps((parent, block, keys), canonical=True)).digest())
            names.append(parent)
        return names


def _little_endian(token_ids: TokenIds) -> npt.NDArray[np.uint32]:
    if not isinstance(token_ids, np.ndarray):
        # Converting a list takes array() 4 ns per token and np.array() 11. The type "I" is a little-endian 32-bit
        # integer on all supported platforms.
        return np.frombuffer(array("I", token_ids), dtype="<u4")
    if not 0 <= index(token_ids.min()) <= index(token_ids.max()) < 1 << 32:
        raise OverflowError(f"token ids are {token_ids.min()} to {token_ids.max()}; give ids from 0 to 2**32 - 1")
    return np.ascontiguousarray(token_ids, dtype="<u4")
