"""ModelClaim: an engine's use of a transformers model, which the caller and other engines may use too."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from kvtier.engine.model.attention import IMPLEMENTATION
from kvtier.engine.model.errors import ChangedModel
from kvtier.engine.model.long_rope import FixedRope, fix_long_rope


@dataclass(eq=False, slots=True)
class _Shared:
    """The state shared by all engines that use one model."""

    own_attention: str  # the model's attention function before the first claim
    fixed_ropes: list[FixedRope]  # rotary embeddings that are fixed while the model has claims
    num_claims: int = 0
    in_use: threading.RLock = field(default_factory=threading.RLock)


_models: WeakKeyDictionary[PreTrainedModel, _Shared] = WeakKeyDictionary()
# Guards `_models` and its counts. Reentrant, because garbage collection may close an engine while the lock is held.
_lock = threading.RLock()


class ModelClaim:
    """An engine's claim on a model. While claimed, the model uses kvtier's attention and fixed LongRoPE frequencies.

    After the release of the last claim, the model uses its own attention function and rotary embedding again. Engines
    in different threads may share a model, so an engine computes only within `alone`, which admits one engine at a
    time. The constructor raises `UnsupportedModel` if the frequencies of the model's LongRoPE cannot be fixed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._is_released = False
        with _lock:
            shared = _models.get(model)
            if shared is None:
                # A copy of a model that was in use has kvtier's attention function but no claim.
                own = _attention_of(model)
                _models[model] = shared = _Shared("eager" if own == IMPLEMENTATION else own, fix_long_rope(model))
            shared.num_claims += 1
        self._shared = shared

    @property
    def own_attention_name(self) -> str:
        """The model's attention function before the first claim."""
        return self._shared.own_attention

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While in the context, keep other engines from computing with the model or changing its attention."""
        with self._shared.in_use:
            yield

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """While in the context, let the model use transformers' own attention, and keep other engines away from it."""
        with self.alone():
            self._model.set_attn_implementation("eager")
            try:
                yield
            finally:
                self.begin()

    def begin(self) -> None:
        """Make the model use kvtier's attention function."""
        self._model.set_attn_implementation(IMPLEMENTATION)

    def check(self) -> None:
        """Raise `ChangedModel` if the model's attention function is not kvtier's."""
        if (found := _attention_of(self._model)) != IMPLEMENTATION:
            raise ChangedModel(
                f"the model's attention was set to {found!r} while kvtier computes with the model; "
                f"call set_attn_implementation({IMPLEMENTATION!r}) on it, or close the engine first"
            )

    def release(self) -> None:
        """End the claim. May be called repeatedly.

        The last claim to end restores the model's own attention function, unless the caller has set another one.
        """
        with _lock:
            if self._is_released:
                return
            self._is_released = True
            self._shared.num_claims -= 1
            if self._shared.num_claims:
                return
            _models.pop(self._model, None)
            for rope in self._shared.fixed_ropes:
                rope.undo()
            if _attention_of(self._model) == IMPLEMENTATION:
                self._model.set_attn_implementation(self._shared.own_attention)


def _attention_of(model: PreTrainedModel) -> str:
    """Return the name of the attention function of the model's text layers.

    A model of text and images may have another one for its configuration as a whole, which transformers does not set.
    """
    name: str = model.config.get_text_config()._attn_implementation
    return name
