"""WatchedPasses: which tokens a model was really given, so that a block's name never says something else."""

import inspect
from types import TracebackType
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from kvtier.engine.doors.transformers_cache.prompt_cache import PromptCache

# What a forward pass may be given that a block's name need not say.
_HARMLESS = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position", "logits_to_keep", "labels"})

_CACHES = ("cache", "past_key_values")  # what forward passes call it: from transformers 5.24 on, and before


class WatchedPasses:
    """A model's forward passes with one cache, while entered. Each is looked at before it runs: ValueError, and with it
    the end of `generate`, for one that is not the rest of the prompt, or that has something else than tokens in it."""

    def __init__(self, model: PreTrainedModel, cache: PromptCache, prompt_ids: list[int]) -> None:
        """*prompt_ids*: the tokens that the cache was made for, whose beginning it has already."""
        self._model = model
        self._cache = cache
        self._prompt_ids = prompt_ids
        self._signature = inspect.signature(model.forward)
        self._passes: list[torch.Tensor] = []  # [num_tokens] each, of those after what was loaded
        self._num_given = 0  # tokens in them
        self._handle: torch.utils.hooks.RemovableHandle | None = None

    def token_ids(self) -> list[int]:
        """The tokens whose keys and values the cache has."""
        num_loaded = self._cache.num_loaded_tokens
        given = [token_id for token_ids in self._passes for token_id in token_ids.tolist()]
        return [*self._prompt_ids[:num_loaded], *given][: self._cache.get_seq_length()]

    def __enter__(self) -> Self:
        self._handle = self._model.register_forward_pre_hook(self._before, with_kwargs=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _before(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is None:  # another thread's pass, between torch's entering a hook and noting that it wants keywords
            return
        given = self._signature.bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        if not any(given.get(name) is self._cache for name in _CACHES):
            return
        token_ids = given.get("input_ids")
        if token_ids is None or token_ids.shape[0] != 1:
            raise ValueError(
                "KVTierCache keeps one sequence of token ids: give input_ids of one prompt, with num_beams and "
                "num_return_sequences 1"
            )
        start = self._cache.get_seq_length()
        self._refuse_others(given, start, token_ids.shape[1])
        self._refuse_other_prompt(token_ids[0], start)
        self._take_back(start - self._cache.num_loaded_tokens)
        self._passes.append(token_ids[0])
        self._num_given += token_ids.shape[1]

    def _take_back(self, num_left: int) -> None:
        """Forget tokens that the cache was given and has no more: an assistant's that were wrong."""
        if self._num_given > num_left:
            self._passes = [torch.cat(self._passes)[:num_left]]
            self._num_given = num_left

    def _refuse_others(self, given: dict[str, Any], start: int, num_tokens: int) -> None:
        for name, value in given.items():
            if isinstance(value, torch.Tensor) and name not in _HARMLESS:
                raise ValueError(f"{name}: KVTierCache knows prompts by their token ids alone; call the model without")
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask.all()):
            raise ValueError("attention_mask: it hides tokens; give KVTierCache prompts without padding")
        if positions is not None and num_tokens > 1:
            usual = torch.arange(start, start + num_tokens, device=positions.device)
            if not bool((positions == usual).all()):
                raise ValueError("position_ids: KVTierCache keeps prompts whose tokens are numbered from 0")

    def _refuse_other_prompt(self, token_ids: torch.Tensor, start: int) -> None:
        expected = self._prompt_ids[start : start + len(token_ids)]
        if expected and token_ids[: len(expected)].tolist() != expected:
            raise ValueError(
                f"the model is given other tokens, from number {start} on, than KVTierCache.prompt was: give both the "
                "same input_ids"
            )
