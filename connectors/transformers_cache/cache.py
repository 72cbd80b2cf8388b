"""`KVTierCache`: a disk cache for the keys and values that transformers' `generate` computes."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from types import TracebackType
from typing import NoReturn, Self

import torch
from transformers import PreTrainedModel

from kvtier.connectors.staged_disk import Rows, StagedDisk
from kvtier.connectors.transformers_cache.model_check import checked_layout
from kvtier.connectors.transformers_cache.prompt_cache import PromptCache
from kvtier.connectors.transformers_cache.row_layout import KeysAndValues, RowLayout
from kvtier.connectors.transformers_cache.watched_passes import WatchedPasses
from kvtier.engine.config import DiskConfig, tree_from_dict
from kvtier.engine.model.digest import config_digest, weights_digest
from kvtier.engine.model.errors import ChangedModel, UnsupportedModel
from kvtier.engine.model.weights_watch import WeightsWatch
from kvtier.engine.one_caller import OneCaller
from kvtier.store.disk_writes import DiskWrites
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys, HashAlgorithm
from kvtier.tiers.naming.namespace import Namespace

log = logging.getLogger(__name__)

BLOCK_SIZE = 16
INDEXED_WAIT_S = 10.0  # max wait for the index of the blocks on disk; the rest is indexed during the first prompts
LAYOUT = "kvtier.transformers:1"  # version of the layout of rows


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """A snapshot of a `KVTierCache`, with totals since it was opened."""

    num_prompts: int
    prompt_tokens: int
    loaded_tokens: int  # prompt tokens that were loaded; the remaining ones were computed
    stored_blocks: int
    unstored_blocks: int  # computed but not stored, because the disk is full of newer blocks, slow, or not open
    corrupt_blocks: int  # found corrupt when read, deleted, and computed again
    disk_bytes: int
    capacity_bytes: int


class KVTierCache:
    """A disk cache of one model's KV blocks, for `model.generate` in the caller's own process.

    The longest prefix of a prompt that is on disk is loaded and verified before `generate` computes the rest. New full
    blocks, including those of the answer, are stored afterwards. A disk fault, even a flipped byte, raises no
    exception. It is counted, and fewer tokens are loaded. Each call of `prompt` serves one sequence. Several threads
    may call it at the same time.
    """

    def __init__(self, model: PreTrainedModel, layout: RowLayout, disk: StagedDisk) -> None:
        """Create the cache from its parts. Users call `open` instead. `close` also closes *disk*."""
        self._model = model
        self._watch = WeightsWatch(model)
        self._calls = OneCaller("KVTierCache")
        self._layout = layout
        self._disk = disk
        self._counting = threading.Lock()
        self._num_prompts = self._prompt_tokens = self._loaded_tokens = 0
        self._stored_blocks = self._unstored_blocks = 0

    @classmethod
    def open(
        cls, path: str | PathLike[str], model: PreTrainedModel, *, block_size: int = BLOCK_SIZE, **disk: object
    ) -> Self:
        """Open the cache of *model* in the folder *path*.

        Caches of other models may share the folder, but only one cache may be open at a time. Opening reads all weights
        once, to compute their digest. If the model is changed afterwards, `prompt` raises `ChangedModel`, and the cache
        must be opened anew. Blocks have *block_size* tokens. *disk* has further keys of the `[disk]` table of kvtier's
        configuration, such as capacity="64GiB".

        Raises:
            UnsupportedModel: If prefixes of this model cannot be reused.
            ConfigError: If a setting is invalid.
        """
        config = tree_from_dict(DiskConfig, {**disk, "path": fspath(path)}, "KVTierCache")
        if block_size < 1:
            raise ValueError(f"block_size {block_size} is too small; give 1 token or more")
        devices = sorted({str(tensor.device) for tensor in (*model.parameters(), *model.buffers())})
        if len(devices) > 1:
            raise UnsupportedModel(
                f"{type(model).__name__} is on several devices ({', '.join(devices)}); load it on a single device"
            )
        weights = weights_digest(model)
        layout = checked_layout(model, block_size)
        namespace = Namespace(
            model=LAYOUT,
            config_digest=config_digest(model.config),
            weights_digest=weights,
            dtype=str(model.dtype),
            geometry=layout.geometry,
            block_size=block_size,
            hash_algorithm=HashAlgorithm.SHA256,
            hash_seed=HashAlgorithm.SHA256.default_seed,
        )
        staged = StagedDisk(config, namespace.digest, layout.row_bytes, DiskWrites.BUFFERED)
        staged.wait_indexed(INDEXED_WAIT_S)
        return cls(model, layout, staged)

    @contextmanager
    def prompt(self, input_ids: torch.Tensor, *, salt: str | None = None) -> Iterator[PromptCache]:
        """Yield a cache that has the prompt's prefix from disk, for `generate(input_ids, past_key_values=...)`.

        *input_ids* has shape [1, num_tokens]. Pass the same ids to `generate`. Prompts with different *salt* share no
        blocks. When the `with` block ends without an exception, the computed blocks are stored.

        Blocks are named by their token ids. So storing stops at the first forward pass whose keys and values depend on
        more than the token ids, such as another mask, other positions or `torch.autocast`. It also stops at a pass that
        bypasses the model's forward hooks. A warning then gives the reason.

        Raises:
            ChangedModel: If the model was changed since the cache was opened, or is in training mode.
            RuntimeError: After `close`, and in a process that was forked after the cache was opened.
        """
        self._calls.check()
        self._refuse_changed()
        if input_ids.dim() != 2 or input_ids.shape[0] != 1:
            raise ValueError(f"input_ids has shape {list(input_ids.shape)}; give one prompt, of shape [1, num_tokens]")
        prompt_ids: list[int] = input_ids[0].tolist()
        chain = BlockChain(self._layout.block_size, ExtraKeys(cache_salt=salt))
        chain.extend(prompt_ids)
        past = PromptCache(self._model.config)
        if not torch.is_autocast_enabled(self._model.device.type):
            self._load(past, chain, max_tokens=len(prompt_ids) - 1)  # one token must be computed to get logits
        with WatchedPasses(self._model, past, prompt_ids, self._layout.shapes) as passes:
            yield past
        num_stored, num_unstored = self._store_named(past, chain, passes.token_ids())
        with self._counting:
            self._num_prompts += 1
            self._prompt_tokens += len(prompt_ids)
            self._loaded_tokens += past.num_loaded_tokens
            self._stored_blocks += num_stored
            self._unstored_blocks += num_unstored

    def statistics(self) -> CacheStatistics:
        """Return a snapshot of all counts."""
        self._calls.check()
        tier = self._disk.statistics().tier
        return CacheStatistics(
            self._num_prompts,
            self._prompt_tokens,
            self._loaded_tokens,
            self._stored_blocks,
            self._unstored_blocks,
            sum(tier.corrupt.values()),
            tier.num_bytes,
            tier.capacity_bytes,
        )

    def clear(self, timeout_s: float = 60.0) -> bool:
        """Delete all stored blocks of this model. Return False if the disk could not delete them."""
        self._calls.check()
        return self._disk.clear(timeout_s)

    def close(self) -> None:
        """Close the disk. Prompts in progress are not stored. Later calls of other methods raise RuntimeError."""
        self._calls.close(self._disk.close)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a KVTierCache has threads, and cannot be pickled or copied; open one in each process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self, past: PromptCache, chain: BlockChain, max_tokens: int) -> None:
        """Load the longest prefix that is on disk into *past*."""
        size = self._layout.block_size
        names = chain.names[: max(0, max_tokens) // size]
        names = names[: self._disk.num_held(names)]
        if not names:
            return
        prefix = self._empty(len(names) * size)

        def take(places: range, rows: Rows) -> None:
            self._layout.read(torch.from_numpy(rows), _cut(prefix, places.start * size, places.stop * size))

        if num_loaded := self._disk.load(names, take):
            past.begin_with(_cut(prefix, 0, num_loaded * size))

    def _refuse_changed(self) -> None:
        if self._watch.is_training:
            raise ChangedModel(f"{type(self._model).__name__} is in training mode; call its eval()")
        if (change := self._watch.sampled_change()) is not None:
            raise ChangedModel(f"the model was changed since KVTierCache.open: {change}; open the cache anew")

    def _store_named(self, past: PromptCache, chain: BlockChain, token_ids: list[int]) -> tuple[int, int]:
        """Name the blocks of *token_ids* and store them, unless the model was changed.

        Returns:
            The number of blocks that were stored, and the number of blocks that could not be stored.
        """
        num_loaded = past.num_loaded_tokens // self._layout.block_size
        if self._calls.is_over or len(token_ids) // self._layout.block_size <= num_loaded:
            return 0, 0
        try:
            self._refuse_changed()
        except ChangedModel as error:
            log.warning("KVTierCache stores nothing of this sequence: %s", error)
            return 0, 0
        chain.cut(num_loaded)
        chain.extend(token_ids)
        return self._store(past, chain)

    def _store(self, past: PromptCache, chain: BlockChain) -> tuple[int, int]:
        """Store computed full blocks that are not on disk yet.

        Returns:
            The number of blocks that were stored, and the number of blocks that could not be stored.
        """
        size = self._layout.block_size
        num_loaded = past.num_loaded_tokens // size
        held = self._disk.are_held(chain.names[num_loaded:])
        if all(held):
            return 0, 0
        first = num_loaded + held.index(False)
        computed = past.kept(first * size, len(chain.names) * size)

        def fill(places: range, rows: Rows) -> None:
            self._layout.write(torch.from_numpy(rows), _cut(computed, places.start * size, places.stop * size))

        stored = self._disk.store(chain.names[first:], chain.names[first - 1] if first else None, fill)
        new = [is_stored for is_stored, was in zip(stored, held[first - num_loaded :], strict=True) if not was]
        return sum(new), len(new) - sum(new)

    def _empty(self, num_tokens: int) -> list[KeysAndValues]:
        """Return uninitialized keys and values for *num_tokens* tokens."""
        return [
            KeysAndValues(
                *(
                    torch.empty(shape.num_heads, num_tokens, dim, dtype=shape.dtype, device=self._model.device)
                    for dim in (shape.key_dim, shape.value_dim)
                )
            )
            for shape in filter(None, self._layout.shapes)
        ]


def _cut(layers: list[KeysAndValues], start: int, end: int) -> list[KeysAndValues]:
    return [KeysAndValues(layer.keys[:, start:end], layer.values[:, start:end]) for layer in layers]
