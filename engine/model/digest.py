"""Digests of a model's configuration and of everything that its modules hold."""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import Module as TorchModule
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from kvtier.engine.model.cpu.packed_linears import PackedLinear
from kvtier.engine.model.errors import UnsupportedModel
from kvtier.engine.model.index_keys import CutIndexer
from kvtier.engine.model.state_layers import SplitMixer

# A thread hashes one piece at a time. All cores hash, because one core hashes only 0.4 GB/s without SHA instructions.
PIECE_BYTES = 4 << 20
# Fields of a configuration that do not change keys and values.
LOADING = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version"})
_BARE = frozenset(vars(TorchModule()))  # attributes of every module: dicts of parts and hooks, and its training flag
# Attributes that change no result: positions that a model's code notes for its next call, although kvtier passes all
# positions, and the rules by which transformers renamed a checkpoint's weights.
_WITHOUT_EFFECT = frozenset({"rope_deltas", "_weight_conversions"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Prefixes of the names of hooks that a digest may ignore. Hooks of transformers only observe. Hooks of `LoraRows`,
# which another engine on the same model may have set, change only results whose block names include the adapter.
LOOKING = ("transformers.utils.output_capturing.", "kvtier.engine.model.lora_rows.")
# Types of attributes that are left out. A configuration has its own digest, a class is hashed with its module, and
# devices, Python modules and generators change no result.
_APART = (PreTrainedConfig, GenerationConfig, torch.device, type, ModuleType, torch.Generator)
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Return a digest of a dense tensor's bytes in row-major order, without its shape and dtype.

    The bytes are cut into pieces of 4 MiB. The digest is the sha256 of the sha256 digests of all pieces.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    numbers: Any = plain.flatten().view(torch.uint8).numpy()  # Any: memoryview does not accept numpy's type
    raw = memoryview(numbers)
    pieces = [raw[start : start + PIECE_BYTES] for start in range(0, len(raw), PIECE_BYTES)]
    if len(pieces) > 1:
        with ThreadPoolExecutor(thread_name_prefix="kvtier-digest") as threads:
            return hashlib.sha256(b"".join(threads.map(_digest, pieces))).digest()
    return hashlib.sha256(b"".join(map(_digest, pieces))).digest()


def _digest(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()


def config_digest(config: PreTrainedConfig) -> str:
    """Return the digest of a model's configuration, without its name and the fields that only affect loading."""
    fields = {key: value for key, value in config.to_dict().items() if key not in LOADING and key[0] != "_"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def weights_digest(model: torch.nn.Module) -> str:
    """Return the digest of everything that the model's modules hold, including state that is not in any file.

    It covers parameters, buffers, other tensors, packed and quantised weights, numbers such as scales, and the names of
    classes and functions. It is the sha256 of a list that contains the sha256 of each tensor.

    Raises:
        UnsupportedModel: If the model has a part that may change results but cannot be read, such as a hook or an
            offloaded weight.
    """
    digest = _Digest()
    for name, module in model.named_modules():
        digest.module(name, module)
    return digest.hexdigest()


def find_hook_or_forward(module: torch.nn.Module, harmless: tuple[str, ...] = LOOKING) -> str | None:
    """Return a description of a module's hook or replaced `forward` that may change its results, or None.

    *harmless* are prefixes of the full names of hooks that are allowed.
    """
    own = vars(module)
    # Copied, because another thread's `generate` may add and remove hooks meanwhile.
    for hook in [hook for hooks in _HOOKS for hook in tuple(own[hooks].values())]:
        if not (name := _function_name(hook)).startswith(harmless):
            return f"a hook ({name})"
    # Allow accelerate's forward, which only moves tensors between devices, and kvtier's packed linear layers, cut
    # indexers and split mixers, which are set while a pass runs.
    own_forward = own.get("forward") if "_hf_hook" not in own else None
    if own_forward is not None and not isinstance(own_forward, PackedLinear | CutIndexer | SplitMixer):
        return f"another forward ({_function_name(own['forward'])})"
    return None


class _Digest:
    """The running hash of `weights_digest`, to which the modules of a model are added one by one."""

    def __init__(self) -> None:
        self._total = hashlib.sha256()
        self._seen: dict[
            int, tuple[str, object]
        ] = {}  # by id, an object and its first name; holding the object keeps its id unique

    def hexdigest(self) -> str:
        return self._total.hexdigest()

    def module(self, name: str, module: torch.nn.Module) -> None:
        """Add a module to the hash, without its submodules."""
        own = vars(module)
        if (code := find_hook_or_forward(module)) is not None:
            self._refuse(name, f"has {code}", "remove it")
        if hasattr(module, "adapter_layer_names"):  # peft's layers
            self._refuse(name, "is a layer of a peft adapter", "merge the adapter into the model, or name it in [lora]")
        self._line(name, _type_name(module))
        for part, value in sorted({**own["_parameters"], **own["_buffers"]}.items()):
            self._feed(f"{name}.{part}", value, with_words=True)
        for part, value in sorted(own.items()):
            if (
                part not in _BARE
                and part not in _WITHOUT_EFFECT
                and part not in ("forward", "_old_forward", "_hf_hook")
            ):
                # Leave out private numbers and strings, which say how the model was loaded, and all strings of a
                # model, which say where it was loaded from.
                is_public = part[0] != "_"
                if isinstance(value, str) and isinstance(module, PreTrainedModel):
                    continue
                self._feed(f"{name}.{part}", value, with_words=is_public)

    def _feed(self, name: str, value: Any, with_words: bool) -> None:
        """Add the tensors in *value* to the hash and, if *with_words*, also its numbers, strings and function names."""
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes() | torch.dtype() | Enum() | range():
                if with_words:
                    self._line(name, repr(value))
            case torch.nn.Module():
                pass  # fed under its own name, or not part of the model
            case FunctionType() | BuiltinFunctionType() | MethodType():
                if with_words:
                    self._line(name, _function_name(value))
            case _ if isinstance(value, _APART):
                pass
            case _ if id(value) in self._seen:
                self._line(name, f"= {self._seen[id(value)][0]}")
            case _:
                self._seen[id(value)] = (name, value)
                self._feed_object(name, value, with_words)

    def _feed_object(self, name: str, value: Any, with_words: bool) -> None:
        match value:
            case torch.Tensor():
                self._tensor(name, value)
            case np.ndarray() | np.generic():
                array = np.ascontiguousarray(value)
                self._line(name, f"{array.shape} {array.dtype}", array.tobytes())
            case functools.partial():
                self._parts(name, {"func": value.func, "args": value.args, **value.keywords}, with_words)
            case Mapping():
                self._parts(name, value, with_words)
            case list() | tuple():
                self._parts(name, dict(enumerate(value)), with_words)
            case Set():
                if with_words:
                    self._line(name, repr(sorted(map(str, value))))
            case torch.ScriptObject():
                self._feed(name, self._state(name, value), with_words)
            case _ if hasattr(value, "__dict__"):
                self._line(name, _type_name(value))
                self._parts(name, vars(value), with_words)
            case _ if _slots(value):
                self._line(name, _type_name(value))
                self._parts(name, {slot: getattr(value, slot, None) for slot in _slots(value)}, with_words)
            case _ if callable(value):
                self._line(name, _function_name(value))
            case _:
                self._refuse(name, f"is a {_type_name(value)}, whose content cannot be read", "load it unpacked")

    def _parts(self, name: str, parts: Mapping[Any, Any], with_words: bool) -> None:
        for key, value in sorted(parts.items(), key=lambda item: str(item[0])):
            self._feed(f"{name}.{key}", value, with_words)

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor to the hash. If it only wraps other tensors, add these and its other data."""
        if hasattr(tensor, "__tensor_flatten__"):
            inner, context = tensor.__tensor_flatten__()
            self._line(name, f"{_type_name(tensor)} {tuple(tensor.shape)} {tensor.dtype}")
            self._feed(f"{name}.context", context, with_words=True)
            for part in inner:
                self._feed(f"{name}.{part}", getattr(tensor, part), with_words=True)
            return
        if tensor.is_meta:
            self._refuse(name, "is not in memory (offloaded?)", "load the whole model onto one device")
        own = getattr(tensor, "__dict__", {})
        if type(tensor) not in _PLAIN:
            self._line(name, _type_name(tensor))
            self._parts(name, {key: value for key, value in own.items() if key != "_is_hf_initialized"}, True)
            tensor = tensor.data.as_subclass(torch.Tensor)
        if tensor.is_quantized:
            self._line(name, f"{tensor.qscheme()} {tensor.dtype}")
            self._feed(f"{name}.values", tensor.int_repr(), with_words=True)
            self._parts(name, _quantisation(tensor), with_words=True)
            return
        if tensor.layout is not torch.strided:
            self._line(name, str(tensor.layout))
            tensor = tensor.to_dense()
        self._line(name, f"{tuple(tensor.shape)} {tensor.dtype}", tensor_digest(tensor))

    def _state(self, name: str, value: torch.ScriptObject) -> Any:
        """Return the state of a TorchScript object, such as packed weights."""
        try:
            return value.__getstate__()
        except (RuntimeError, AttributeError, NotImplementedError):
            self._refuse(name, f"is a {_type_name(value)}, whose content cannot be read", "load it unpacked")

    def _line(self, name: str, what: str, digest: bytes = b"") -> None:
        # Each part follows its length, so that different sequences of parts give different bytes.
        for part in (name.encode(), what.encode(), digest):
            self._total.update(len(part).to_bytes(8, "little") + part)

    def _refuse(self, name: str, what: str, advice: str) -> Any:
        raise UnsupportedModel(
            f"the model cannot keep its KV cache in kvtier: its {name or 'outermost module'} {what}, "
            f"and kvtier must read every part of a model to name its blocks; {advice}"
        )


def _quantisation(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the scales and zero points of a quantised tensor."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    return {
        "scales": tensor.q_per_channel_scales(),
        "zero_points": tensor.q_per_channel_zero_points(),
        "axis": tensor.q_per_channel_axis(),
    }


def _slots(value: object) -> list[str]:
    return sorted(slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ()))


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _function_name(function: Callable[..., Any]) -> str:
    named = function.func if isinstance(function, functools.partial) else function
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(named).__qualname__)}"
