"""`WatchedPasses`: a record of the tokens that a model really computed, so that block names match the blocks' bytes."""

import inspect
import logging
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from kvtier.connectors.transformers_cache.kept_states import KeptStates
from kvtier.connectors.transformers_cache.prompt_cache import PromptCache
from kvtier.connectors.transformers_cache.row_layout import RowLayout

log = logging.getLogger(__name__)

# Arguments of a forward pass that are checked on their own, or do not change keys and values.
_HARMLESS = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position", "logits_to_keep", "labels"})

_CACHES = ("cache", "past_key_values")  # names of the cache's argument: the first since transformers 5.24


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass of the model that used the cache."""

    start: int  # number of tokens in the cache before the pass
    token_ids: torch.Tensor  # [num_tokens]
    # Position of a generated token, or None if there is no position to check later. It is checked at the end of the
    # sequence, because reading it from a GPU waits for all earlier work.
    positions: torch.Tensor | None
    thread: int

    @property
    def end(self) -> int:
        """Number of tokens in the cache after the pass."""
        return self.start + len(self.token_ids)


class WatchedPasses:
    """A record of a model's forward passes with one cache. It watches the model while its `with` block runs.

    Each pass is checked before it runs, and the cache's length is checked afterwards. The sequence is *closed* at the
    first pass whose keys and values depend on more than the token ids, such as another mask, other positions or another
    dtype. Tokens from that pass on are not stored, and one warning gives the reason.

    A pass raises ValueError, which ends `generate`, in three cases: its tokens differ from the prompt, it has inputs
    other than tokens, or it would have computed different keys and values for the prefix that the cache was given with.
    """

    def __init__(
        self, model: PreTrainedModel, cache: PromptCache, prompt_ids: list[int], layout: RowLayout, states: KeptStates
    ) -> None:
        """Create a record of passes with *cache*, which may already have a loaded prefix of *prompt_ids*.

        *layout* has the shapes of what the layers keep. *states* gets the states after each pass.
        """
        self._model = model
        self._cache = cache
        self._prompt_ids = prompt_ids
        self._shapes = layout.shapes
        self._has_states = bool(layout.states.tensors)
        self._states = states
        self._signature = inspect.signature(model.forward)
        self._needs_positions = self._has_states and "position_ids" in self._signature.parameters
        self._passes: list[_Pass] = []
        self._num_known = cache.num_loaded_tokens
        self._running: _Pass | None = None
        self._has_used_states = False  # in the running pass
        self._closed_at: int | None = None  # number of tokens before the sequence was closed
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def token_ids(self) -> list[int]:
        """Return the ids of the tokens in the cache that may be stored.

        They end before the first forward pass that failed, or whose keys and values depend on more than token ids.
        """
        self._close_at_other_positions()
        if self._running is not None or self._cache.get_seq_length() > self._num_known:
            self._close(min(self._num_known, self._cache.get_seq_length()), "the last pass failed or was not seen")
        token_ids = self._prompt_ids[: self._cache.num_loaded_tokens]
        for it in self._passes:
            token_ids = [*token_ids[: it.start], *it.token_ids.tolist()]
        return token_ids[: self._cache.get_seq_length()][: self._closed_at]

    def __enter__(self) -> Self:
        self._cache.on_update, self._cache.on_index = self._entering, self._entering_index
        self._cache.on_state = self._using_state
        self._handles = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cache.on_update = self._cache.on_index = self._cache.on_state = None
        for handle in self._handles:
            handle.remove()

    def _before(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is None:  # a pass of another thread, before torch has recorded that this new hook takes `kwargs`
            return
        given = self._signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        if not any(given.get(name) is self._cache for name in _CACHES):
            return
        token_ids = given.get("input_ids")
        if token_ids is None or token_ids.shape[0] != 1:
            raise ValueError(
                "KVTierCache supports one sequence of token ids; give input_ids of one prompt, with num_beams=1 and "
                "num_return_sequences=1"
            )
        start, num_tokens = self._cache.get_seq_length(), token_ids.shape[1]
        if self._running is not None:
            self._close(self._running.start, "an earlier pass failed")
        if start > self._num_known:
            self._close(self._num_known, "the cache has tokens of a pass that KVTierCache did not see")
        if start < self._cache.num_loaded_tokens:
            self._close(start, "loaded tokens were cropped from the cache")
        _refuse_others(given)
        self._refuse_other_prompt(token_ids[0], start)
        if (why := self._undescribed(given, start, num_tokens)) is not None:
            self._close_or_refuse(start, why)
        positions = given.get("position_ids") if self._is_looked_at_later(start, num_tokens) else None
        kept = None if positions is None else positions.detach().clone()
        self._states.crop(start)
        self._has_used_states = False
        self._running = _Pass(start, token_ids[0], kept, threading.get_ident())

    def _after(self, model: torch.nn.Module, args: tuple[Any, ...], output: object) -> None:
        running = self._running
        if running is None or running.thread != threading.get_ident():
            return
        self._running = None
        if self._has_used_states:
            self._cache.advance_to(running.end)
        length = self._cache.get_seq_length()
        if length == running.end:
            self._passes.append(running)
            self._num_known = length
            self._states.keep(length, self._model.device)
        elif length != running.start:  # equal: the pass did not use the cache
            self._close(
                running.start,
                f"a pass of {len(running.token_ids)} tokens added {length - running.start} to the cache",
            )

    def _entering(self, keys: torch.Tensor, values: torch.Tensor, layer_id: int) -> None:
        """Check keys and values before a layer adds them to the cache."""
        running = self._running
        if running is None or running.thread != threading.get_ident():
            self._close_at_unseen()
            return
        shape = self._shapes[layer_id] if layer_id < len(self._shapes) else None
        if shape is None or {keys.dtype, values.dtype} != {shape.dtype} or keys.device != self._model.device:
            self._close_or_refuse(running.start, f"its keys are {keys.dtype} on {keys.device}")
        elif keys.shape[-2] != len(running.token_ids):
            self._close(running.start, "a layer kept a different number of tokens than the pass has")

    def _entering_index(self, index_keys: torch.Tensor, layer_id: int) -> None:
        """Check index keys before a layer adds them to the cache."""
        running = self._running
        if running is None or running.thread != threading.get_ident():
            self._close_at_unseen()
            return
        shape = self._shapes[layer_id] if layer_id < len(self._shapes) else None
        if shape is None or index_keys.dtype != shape.dtype or index_keys.shape[-1] != shape.index_dim:
            self._close_or_refuse(
                running.start, f"its index keys are {index_keys.dtype} of width {index_keys.shape[-1]}"
            )
        elif index_keys.shape[-2] != len(running.token_ids):
            self._close(running.start, "a layer kept a different number of index keys than the pass has tokens")

    def _using_state(self) -> None:
        """Check that a pass may read or write a state."""
        self._has_used_states = True
        if self._running is None or self._running.thread != threading.get_ident():
            self._close_at_unseen()

    def _close_at_unseen(self) -> None:
        num_tokens = min(self._cache.get_seq_length(), self._num_known)
        self._close(num_tokens, "a pass that KVTierCache did not see added tokens to the cache")

    def _undescribed(self, given: dict[str, Any], start: int, num_tokens: int) -> str | None:
        """Return why the keys and values of a pass depend on more than its token ids, or None if they do not."""
        if torch.is_autocast_enabled(self._model.device.type):
            return "torch.autocast computes it in another dtype"
        mask = given.get("attention_mask")
        has_others = self._has_states or any(shape is not None and shape.window for shape in self._shapes)
        if mask is not None and not _is_plain(mask, start, num_tokens, has_others):
            return "its attention_mask is not the causal one"
        if self._needs_positions and start and given.get("position_ids") is None:
            return "it has no position_ids, and models with states may then number its tokens from 0 on"
        for name in ("position_ids", "cache_position"):
            positions = given.get(name)
            if positions is None or self._is_looked_at_later(start, num_tokens):
                continue
            if not _are_consecutive(positions, start, num_tokens):
                return f"its {name} do not number the tokens from 0 on"
        return None

    def _is_looked_at_later(self, start: int, num_tokens: int) -> bool:
        # True for a pass of a single generated token, see `_Pass.positions`.
        return num_tokens == 1 and start >= len(self._prompt_ids)

    def _close_or_refuse(self, start: int, why: str) -> None:
        # After a prefix that the cache was given with, the rest of the prompt must be computed in the same way.
        if self._cache.num_given_tokens and start < len(self._prompt_ids):
            raise ValueError(
                f"KVTierCache has loaded {self._cache.num_loaded_tokens} tokens that a plain pass computed (with the "
                f"model's own mask, positions and dtype)"
                f"{self._computed_too()}, but this pass would compute them differently: {why}; use another cache for "
                "this call of generate()"
            )
        self._close(start, why)

    def _computed_too(self) -> str:
        num_computed = self._cache.num_given_tokens - self._cache.num_loaded_tokens
        return f", and has computed {num_computed} more in this way" if num_computed else ""

    def _close(self, num_tokens: int, why: str) -> None:
        """Close the sequence, so that only its first *num_tokens* tokens are stored."""
        if self._closed_at is None:
            log.warning("KVTierCache stores at most the first %d tokens of this sequence: %s", num_tokens, why)
        self._closed_at = num_tokens if self._closed_at is None else min(num_tokens, self._closed_at)

    def _close_at_other_positions(self) -> None:
        for it in self._passes:
            if it.positions is not None and not _are_consecutive(it.positions, it.start, 1):
                self._close(it.start, "its position_ids do not number the tokens from 0 on")
                return

    def _refuse_other_prompt(self, token_ids: torch.Tensor, start: int) -> None:
        expected = self._prompt_ids[start : start + len(token_ids)]
        if expected and token_ids[: len(expected)].tolist() != expected:
            raise ValueError(
                f"from token {start} on, the model gets other tokens than KVTierCache.prompt got; give both the same "
                "input_ids"
            )


def _refuse_others(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in _HARMLESS and name not in _CACHES and _has_tensor(value):
            raise ValueError(
                f"KVTierCache identifies prompts by their token ids alone; call the model without the argument {name}"
            )
    mask = given.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask.all()):
        raise ValueError("attention_mask hides tokens; give KVTierCache a prompt without padding")


def _has_tensor(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def _is_plain(mask: object, start: int, num_tokens: int, has_others: bool) -> bool:
    """Return whether *mask* is the mask that the model makes itself for a prompt without padding.

    *has_others* is True if the model has layers other than those with full attention.

    A mask with two dimensions was already checked to hide no tokens, see `_refuse_others`.
    """
    if not isinstance(mask, torch.Tensor):
        return False
    if mask.dim() == 2:
        return True
    if mask.dim() != 4 or mask.shape[-2:] != (num_tokens, start + num_tokens) or has_others:
        return False  # such a mask applies to all layers, including those with windows or states
    causal = torch.ones(num_tokens, start + num_tokens, dtype=torch.bool, device=mask.device).tril(start)
    if mask.dtype == torch.bool:
        return bool((mask == causal).all())
    if not mask.dtype.is_floating_point:
        return False
    is_hidden = mask <= torch.finfo(mask.dtype).min / 2
    return bool(torch.where(causal, mask == 0, is_hidden).all())


def _are_consecutive(positions: torch.Tensor, start: int, num_tokens: int) -> bool:
    usual = torch.arange(start, start + num_tokens, device=positions.device)
    return positions.shape[-1] == num_tokens and bool((positions == usual).all())
