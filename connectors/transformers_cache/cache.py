"""`KVTierCache`: a disk cache for the keys and values that transformers' `generate` computes."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from types import TracebackType
from typing import NoReturn, Self

import torch
from transformers import PreTrainedModel

from kvtier.connectors.staged_disk import Rows, StagedDisk
from kvtier.connectors.transformers_cache.kept_states import KeptStates, chunk_ends, places_to_keep
from kvtier.connectors.transformers_cache.model_check import checked_layout
from kvtier.connectors.transformers_cache.prompt_cache import PromptCache, compute
from kvtier.connectors.transformers_cache.row_layout import KeysAndValues, RowLayout
from kvtier.connectors.transformers_cache.watched_passes import WatchedPasses
from kvtier.engine.config import DiskConfig, tree_from_dict
from kvtier.engine.model.digest import config_digest, weights_digest
from kvtier.engine.model.errors import ChangedModel, UnsupportedModel
from kvtier.engine.model.state_layers import StateSlab
from kvtier.engine.model.weights_watch import WeightsWatch
from kvtier.engine.one_caller import OneCaller
from kvtier.store.disk_writes import DiskWrites
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, ExtraKeys, HashAlgorithm
from kvtier.tiers.naming.groups import FullAttention, RecurrentState, longest_hit
from kvtier.tiers.naming.namespace import Namespace

log = logging.getLogger(__name__)

BLOCK_SIZE = 16
INDEXED_WAIT_S = 10.0  # max wait for the index of the blocks on disk; the rest is indexed during the first prompts
LAYOUT = "kvtier.transformers:1"  # version of the layout of rows
KEYS_AND_VALUES, STATES = 0, 1  # groups of blocks on disk


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
    stored_states: int = 0  # of recurrent layers and convolutions, each after one block
    unstored_states: int = 0


class KVTierCache:
    """A disk cache of one model's KV blocks and states, for `model.generate` in the caller's own process.

    The longest prefix of a prompt that is on disk is loaded and verified before `generate` computes the rest. New full
    blocks, including those of the answer, are stored afterwards. A disk fault, even a flipped byte, raises no
    exception. It is counted, and fewer tokens are loaded. Each call of `prompt` serves one sequence. Several threads
    may call it at the same time.

    A model with recurrent or convolution states can resume only where a state was stored, and a state exists only where
    a pass ended. So with such a model, `prompt` computes most of the prompt itself, in passes that end where states are
    kept (see `places_to_keep`).
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
        self._stored_blocks = self._unstored_blocks = self._stored_states = self._unstored_states = 0

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
        row_bytes = [layout.row_bytes, *([layout.states.slot_bytes] if layout.states.tensors else [])]
        staged = StagedDisk(config, namespace.digest, row_bytes, DiskWrites.BUFFERED)
        staged.wait_indexed(INDEXED_WAIT_S)
        return cls(model, layout, staged)

    @contextmanager
    def prompt(self, input_ids: torch.Tensor, *, salt: str | None = None) -> Iterator[PromptCache]:
        """Yield a cache that has the prompt's prefix from disk, for `generate(input_ids, past_key_values=...)`.

        *input_ids* has shape [1, num_tokens]. Pass the same ids to `generate`. Prompts with different *salt* share no
        blocks. When the `with` block ends without an exception, the computed blocks are stored.

        If the model has states, the cache is yielded with the whole prompt except for its last tokens, as `generate`
        expects it. `num_loaded_tokens` of these were loaded.

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
        is_plain = not torch.is_autocast_enabled(self._model.device.type)
        if is_plain:
            self._load(past, chain, max_tokens=len(prompt_ids) - 1)  # one token must be computed to get logits
        places = self._places(chain, len(prompt_ids))
        states = KeptStates(past, self._layout.states, self._layout.block_size, places)
        with WatchedPasses(self._model, past, prompt_ids, self._layout, states) as passes:
            if is_plain:
                self._compute(past, input_ids, chunk_ends(past.num_loaded_tokens, places))
            yield past
        self._store_named(past, chain, passes.token_ids(), states)
        with self._counting:
            self._num_prompts += 1
            self._prompt_tokens += len(prompt_ids)
            self._loaded_tokens += past.num_loaded_tokens

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
            self._stored_states,
            self._unstored_states,
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
        """Load the longest prefix that is on disk, and from which the model can resume, into *past*."""
        size, num_blocks = self._layout.block_size, max(0, max_tokens) // self._layout.block_size
        while num_blocks := self._num_resumable(chain.names[:num_blocks]):
            slab = self._load_states(chain.names[num_blocks - 1])
            if slab is None:  # its block cannot be read
                num_blocks -= 1
                continue
            prefix = self._layout.empty(num_blocks * size, self._model.device)

            def take(places: range, rows: Rows, prefix: list[KeysAndValues] = prefix) -> None:
                self._layout.read(torch.from_numpy(rows), _cut(prefix, places.start * size, places.stop * size))

            num_loaded = self._disk.load(chain.names[:num_blocks], take)
            if num_loaded == num_blocks or (num_loaded and not self._layout.states.tensors):
                num_tokens = num_loaded * size
                past.begin_with(num_tokens, _cut(prefix, 0, num_tokens), self._layout.states_in(slab))
                return
            num_blocks = num_loaded

    def _num_resumable(self, names: Sequence[BlockName]) -> int:
        """Return after how many of the blocks *names* the model can resume."""
        size = self._layout.block_size
        num_held = self._disk.num_held(names)
        if not self._layout.states.tensors:
            return num_held
        has_state = self._disk.are_held(names, STATES)

        def first_hole(group_id: int, start: int, end: int) -> int:
            if group_id == KEYS_AND_VALUES:
                return min(num_held, end)
            return next((block for block in range(start, end) if not has_state[block]), end)

        return longest_hit(len(names) * size, [FullAttention(size), RecurrentState(size)], first_hole) // size

    def _load_states(self, name: BlockName) -> StateSlab | None:
        """Return the states after the block *name*, or None if they cannot be read. A model may have no states."""
        slab = StateSlab(1, self._layout.states, self._model.device)
        if not self._layout.states.tensors:
            return slab

        def take(places: range, rows: Rows) -> None:
            slab.blocks.copy_(torch.from_numpy(rows))

        return slab if self._disk.load([name], take, STATES) else None

    def _places(self, chain: BlockChain, num_tokens: int) -> list[int]:
        """Return the positions in a prompt of *num_tokens* tokens whose states are kept. A model may have no states."""
        if not self._layout.states.tensors:
            return []
        size = self._layout.block_size
        return places_to_keep(num_tokens, self._disk.num_held(chain.names) * size, size)

    def _compute(self, past: PromptCache, input_ids: torch.Tensor, ends: Sequence[int]) -> None:
        """Compute the tokens of a prompt that *past* does not have yet, in passes that end at *ends*."""
        with torch.no_grad():
            for end in ends:
                start = past.get_seq_length()
                compute(self._model, past, input_ids[:, start:end].to(self._model.device), num_logits=1)
        past.num_given_tokens = past.get_seq_length()

    def _refuse_changed(self) -> None:
        if self._watch.is_training:
            raise ChangedModel(f"{type(self._model).__name__} is in training mode; call its eval()")
        if (change := self._watch.sampled_change()) is not None:
            raise ChangedModel(f"the model was changed since KVTierCache.open: {change}; open the cache anew")

    def _store_named(self, past: PromptCache, chain: BlockChain, token_ids: list[int], states: KeptStates) -> None:
        """Name the blocks of *token_ids* and store them and their states, unless the model was changed."""
        num_loaded = past.num_loaded_tokens // self._layout.block_size
        if self._calls.is_over or len(token_ids) // self._layout.block_size <= num_loaded:
            return
        try:
            self._refuse_changed()
        except ChangedModel as error:
            log.warning("KVTierCache stores nothing of this sequence: %s", error)
            return
        chain.cut(num_loaded)
        chain.extend(token_ids)
        num_stored, num_unstored = self._store(past, chain)
        num_stored_states, num_unstored_states = self._store_states(past, chain, states)
        with self._counting:
            self._stored_blocks += num_stored
            self._unstored_blocks += num_unstored
            self._stored_states += num_stored_states
            self._unstored_states += num_unstored_states

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

    def _store_states(self, past: PromptCache, chain: BlockChain, states: KeptStates) -> tuple[int, int]:
        """Store the kept states that are not on disk yet, if the keys and values of the blocks before them are there.

        Returns:
            The number of states that were stored, and the number of states that could not be stored.
        """
        outcomes: list[bool] = []
        num_held = self._disk.num_held(chain.names)
        for place, state in states.up_to(len(chain.names) * self._layout.block_size):
            number = place // self._layout.block_size
            name = chain.names[number - 1]
            if place <= past.num_loaded_tokens or self._disk.are_held([name], STATES)[0]:
                continue

            def fill(places: range, rows: Rows, state: torch.Tensor = state) -> None:
                torch.from_numpy(rows).copy_(state)

            outcomes.append(number <= num_held and self._disk.store([name], None, fill, STATES)[0])
        return sum(outcomes), len(outcomes) - sum(outcomes)


def _cut(layers: list[KeysAndValues], start: int, end: int) -> list[KeysAndValues]:
    return [layer.cut(start, end) for layer in layers]
