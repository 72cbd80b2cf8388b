"""Miniatures: small copies of a model, on which `check` compares attention on long prompts in a short time.

A miniature has the model's code, narrow layers, small limits and random weights, in float32 on the CPU.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvtier.engine.model.errors import oom_as_memory_error

# Windows, chunks, top-k, block sizes and similar limits are cut to this. The prompts that miniatures are checked with
# are longer than the product of two such limits.
LIMIT = 16
VOCAB = 64
WIDTH = 64  # inner width of a feed-forward layer
EXPERTS = 8
MAX_PARAMETERS = 1 << 29  # of a miniature: 2 GiB
# Scale of the random weights: large enough that attention is not a mean of all values, so that a wrong key shows.
GAIN = 2.0
_INNER = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "inner_dim", "d_ff")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHAPING = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
_ERRORS = (ValueError, TypeError, KeyError, RuntimeError, AttributeError, IndexError, AssertionError, ZeroDivisionError)


class NoMiniature(ValueError):
    """An error for a configuration of which no miniature can be built; the message says what failed."""


@dataclass(frozen=True, slots=True)
class Number:
    """A reference to one number in a model's configuration, which can be read and replaced."""

    holder: Any  # a configuration, a dict or a list
    key: str | int

    def get(self) -> Any:
        """Return the current value of this number in the configuration."""
        return getattr(self.holder, str(self.key)) if _is_config(self.holder) else self.holder[self.key]

    def set(self, value: Any) -> None:
        """Replace the number."""
        if _is_config(self.holder):
            setattr(self.holder, str(self.key), value)
        else:
            self.holder[self.key] = value


def miniatures(model: PreTrainedModel, layers: Sequence[object]) -> Iterator[PreTrainedModel]:
    """Yield small models with the class of *model* and a reduced copy of its configuration, the smallest first.

    *layers* are the kinds of the model's attention layers, in order. A miniature has enough layers to include one of
    each kind. Widths, number of layers and vocabulary are small. Every other number above `LIMIT` in the configuration,
    such as a window, a top-k or a block size, becomes `LIMIT`. A number keeps its value only
    if the shape of a weight depends on it, or if the code fails with `LIMIT`. Weights are random but always the same. A
    caller that finds a model too different from the original can try the next, larger one.

    Raises:
        NoMiniature: If the caller asks for a model after the last one, or if none could be built.
    """
    reason: Exception | None = None
    depth = max(2, next(i for i in range(1, len(layers) + 1) if set(layers[:i]) == set(layers)))
    for is_narrow in (True, False):
        for num_layers in dict.fromkeys((min(depth, len(layers)), len(layers))):
            try:
                config = _reduced(model.config, num_layers, is_narrow)
                small = _limited(type(model), config)
            except _ERRORS as error:
                reason = reason or error
            else:
                yield small
    raise NoMiniature(
        f"building one raises {type(reason).__name__}" if reason else "none has the model's kinds of attention"
    ) from reason


def _reduced(original: PreTrainedConfig, num_layers: int, is_narrow: bool) -> PreTrainedConfig:
    """Return a copy with *num_layers* layers, a small vocabulary, few experts and, if *is_narrow*, few heads."""
    config = copy.deepcopy(original)
    config.dtype = torch.float32
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    text = config.get_text_config()
    _cut_vocabulary(config)
    _cut_layers(text, num_layers)
    _cut_inner(text)
    for other in vars(config).values():
        if isinstance(other, PreTrainedConfig) and other is not text and hasattr(other, "num_hidden_layers"):
            _cut_layers(other, 1)
    if is_narrow:
        _cut_heads(text)
    return config


def _cut_vocabulary(config: PreTrainedConfig) -> None:
    for holder in _parts(config):
        for name, value in list(vars(holder).items()):
            if name.endswith("token_id") and isinstance(value, int):
                setattr(holder, name, VOCAB - 1)
            elif name.endswith("token_id") and isinstance(value, list):
                setattr(holder, name, [VOCAB - 1])
            elif name.startswith("vocab_size") and isinstance(value, int):
                setattr(holder, name, VOCAB)


def _cut_layers(config: PreTrainedConfig, num_layers: int) -> None:
    before = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == before > num_layers:
            setattr(config, name, value[:num_layers])
    config.num_hidden_layers = num_layers


def _cut_inner(config: PreTrainedConfig) -> None:
    at_once = [value for name, value in vars(config).items() if "per_tok" in name or "top" in name]
    experts = max([EXPERTS, *(2 * value for value in at_once if isinstance(value, int))])
    for name, value in list(vars(config).items()):
        if isinstance(value, int) and not isinstance(value, bool):
            if name.endswith(_INNER) and value > WIDTH:
                setattr(config, name, WIDTH)
            elif name in _EXPERTS and value > experts:
                setattr(config, name, experts)


def _cut_heads(config: PreTrainedConfig) -> None:
    """Cut the number of heads to the minimum, keeping their size."""
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    few = min(2, num_kv_heads)
    config.num_attention_heads = few * min(2, num_heads // num_kv_heads)
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = few
    config.hidden_size = config.num_attention_heads * head_dim
    _cut_linear_heads(config)


def _cut_linear_heads(config: PreTrainedConfig) -> None:
    """Cut the number of heads of linear attention and of Mamba 2, keeping their size.

    The number of values for each key stays. Mamba's heads have `mamba_expand` times the hidden size together.
    """
    num_keys = getattr(config, "linear_num_key_heads", None)
    num_values = getattr(config, "linear_num_value_heads", None)
    if num_keys and num_values:
        config.linear_num_key_heads = min(2, num_keys)
        config.linear_num_value_heads = config.linear_num_key_heads * (num_values // num_keys)
    if getattr(config, "linear_num_heads", None):
        config.linear_num_heads = min(2, config.linear_num_heads)
    expand, head_dim = getattr(config, "mamba_expand", None), getattr(config, "mamba_d_head", None)
    if expand and isinstance(head_dim, int) and hasattr(config, "mamba_n_heads"):
        config.mamba_n_heads = max(1, expand * config.hidden_size // head_dim)


def _limited(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model from *config*, after reducing as many of its numbers as possible to `LIMIT`.

    A number keeps its value if the shape of a weight depends on it, or if the model's code fails with the smaller one.
    """
    shapes = _shapes(_skeleton(kind, config))
    if sum(shape.numel() for shape in shapes.values()) > MAX_PARAMETERS:
        raise ValueError("a small copy of the model would still have too many parameters")
    _try(_build(kind, config))
    numbers = [number for part in _parts(config) for number in _numbers(part)]
    before = [number.get() for number in numbers]
    for number in numbers:
        number.set(LIMIT)
    if not _runs(kind, config, shapes):  # some number must keep its value, so cut them one by one
        for number, value in zip(numbers, before, strict=True):
            number.set(value)
        for number, value in zip(numbers, before, strict=True):
            number.set(LIMIT)
            if not _runs(kind, config, shapes):
                number.set(value)
    return _build(kind, config)


def _parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return the configuration and, if it has a separate one for its text model, that one too."""
    text = config.get_text_config()
    return [config] if text is config else [config, text]


def _numbers(holder: Any) -> Iterator[Number]:
    """Yield the numbers above `LIMIT` in a configuration, without those of its nested configurations."""
    if _is_config(holder):
        shaping = {*_SHAPING, *(holder.attribute_map[name] for name in _SHAPING if name in holder.attribute_map)}
        items = [item for item in vars(holder).items() if item[0][0] != "_" and item[0] not in shaping]
    else:
        items = list(holder.items() if isinstance(holder, dict) else enumerate(holder))
    for key, value in items:
        if isinstance(value, dict | list):
            yield from _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool) and value > LIMIT:
            yield Number(holder, key)


def _runs(kind: type[PreTrainedModel], config: PreTrainedConfig, shapes: Mapping[str, torch.Size]) -> bool:
    """Return whether the model's code runs with the configuration and its weights have these *shapes*."""
    try:
        if _shapes(_skeleton(kind, config)) != shapes:
            return False
        _try(_build(kind, config))
    except _ERRORS:
        return False
    return True


def _skeleton(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return _construct(kind, config)


@oom_as_memory_error("making a small copy of the model to compare its attention")
def _build(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(7)
        model = _construct(kind, config)
        for weights in model.parameters():
            if weights.dim() >= 2:
                weights.normal_(0, GAIN * weights.shape[-1] ** -0.5)
            else:
                weights.add_(torch.randn_like(weights), alpha=0.3)
    return model.eval()  # type: ignore[no-any-return, no-untyped-call]  # untyped in transformers


def _construct(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = kind._from_config(  # type: ignore[no-untyped-call]  # untyped in transformers
        copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager"
    )
    return model


@oom_as_memory_error("running a small copy of the model to compare its attention")
def _try(model: PreTrainedModel) -> None:
    """Run the model once, to see whether its code works with the reduced configuration.

    The prompt is longer than any window or chunk that was reduced to `LIMIT`.
    """
    with torch.inference_mode():
        model(input_ids=torch.arange(3 * LIMIT)[None] % (VOCAB // 2), use_cache=False)


def _shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.shape for name, tensor in tensors.items()}


def _is_config(holder: object) -> bool:
    return isinstance(holder, PreTrainedConfig)
