"""LoraAdapter: the deltas that a LoRA adds to a model's linear layers, read from a folder written by `peft`."""

import copy
import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from kvtier.engine.config import LoraConfig
from kvtier.engine.model.adapter_folder import UnusableLora, check_adapter_folder
from kvtier.engine.model.digest import tensor_digest
from kvtier.engine.model.errors import oom_as_memory_error
from kvtier.tiers.naming.block_hash import Lora

if TYPE_CHECKING:
    from peft import PeftConfig

# Names of initializations that leave the base weights unchanged. Others change them before training, or are unknown.
PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal"})
_ADAPTER = "kvtier"  # the adapter's name in peft while it is read
_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, SafetensorError)


@dataclass(frozen=True, slots=True, eq=False)
class LoraDelta:
    """The term that a LoRA adds to the output of one linear layer: scale · up(down(input))."""

    down: torch.Tensor  # [rank, in_features], peft's lora_A
    up: torch.Tensor  # [out_features, rank], lora_B
    scale: float

    def to(self, device: torch.device) -> "LoraDelta":
        """Return this delta with its weights on *device*."""
        return LoraDelta(self.down.to(device), self.up.to(device), self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """An adapter's weights, on the model's device and in its dtype. The model itself is unchanged."""

    key: Lora  # part of block names: the adapter's name in the configuration and a digest of its deltas
    deltas: Mapping[str, LoraDelta]  # by the layer's name in the model


def load_adapters(
    model: PreTrainedModel, tables: Mapping[str, LoraConfig], progress: Callable[[str], None] = lambda stage: None
) -> list[LoraAdapter]:
    """Load the adapters in *tables*, which are the `[lora]` tables of a configuration by adapter name.

    Calls *progress* with a message before each adapter. Raises the errors of `load_adapter`.
    """
    adapters = []
    for name, table in tables.items():
        progress(f"loading the adapter {name}")
        adapters.append(load_adapter(model, name, table.path))
    return adapters


def load_adapter(model: PreTrainedModel, name: str, folder: str | Path) -> LoraAdapter:
    """Load the adapter in *folder* and give it the name *name*. The model is not changed.

    `peft` itself interprets the adapter's targets, ranks and scales, by injecting the adapter into a copy of the model
    without weights. The model may be on the meta device.

    Raises:
        UnusableLora: If the folder has no LoRA for this model.
        MissingExtra: If peft is not installed.
    """
    folder = Path(folder).expanduser()
    check_adapter_folder(name, folder)
    try:
        with oom_as_memory_error(f"loading the adapter {name}"):
            deltas = _read(model, folder)
    except UnusableLora as error:
        raise UnusableLora(f"lora {name}: {error} ({folder})") from None
    except _ERRORS as error:
        raise UnusableLora(f"lora {name}: peft cannot load it into {type(model).__name__}: {_line(error)}") from error
    key = Lora(name, f"sha256:{deltas_digest(deltas)}")
    return LoraAdapter(key, {layer: delta.to(model.device) for layer, delta in deltas.items()})


def deltas_digest(deltas: Mapping[str, LoraDelta]) -> str:
    """Return a digest of everything in an adapter that changes keys and values.

    The digest covers the layers' names, the scales, and the shapes, dtypes and bytes of the weights. Other fields of an
    adapter's configuration, such as the task or dropout, change no keys or values.
    """
    total = hashlib.sha256()
    for name, delta in sorted(deltas.items()):
        total.update(f"{name} ".encode() + struct.pack("<d", delta.scale))
        for weights in (delta.down, delta.up):
            total.update(f"{tuple(weights.shape)} {weights.dtype} ".encode() + tensor_digest(weights))
    return total.hexdigest()


def _read(model: PreTrainedModel, folder: Path) -> dict[str, LoraDelta]:
    from peft import PeftConfig, inject_adapter_in_model, set_peft_model_state_dict
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.save_and_load import load_peft_weights

    config = PeftConfig.from_pretrained(str(folder))
    _check_plain(config)
    weights = load_peft_weights(str(folder), device="cpu")
    base = _base_of(weights, model)
    skeleton = base.skeleton
    inject_adapter_in_model(config, skeleton, adapter_name=_ADAPTER, low_cpu_mem_usage=True)
    layers: dict[str, Linear] = {}
    for name, module in skeleton.named_modules():
        if type(module) is Linear and not module.lora_variant and not module.lora_bias[_ADAPTER]:
            layers[base.name_in_model(name)] = module
            module.lora_A.to_empty(device="cpu")
            module.lora_B.to_empty(device="cpu")
        elif isinstance(module, BaseTunerLayer):
            raise UnusableLora(
                f"its part for {name} is no plain LoRA of a linear layer, which is the only kind that kvtier supports"
            )
    # If the output layer is a target, peft has saved its base weights too.
    for name in [name for name in weights if ".lora_" not in name]:
        _check_same(model, base.name_in_model(_layer_name(name)), weights.pop(name))
    result: Any = set_peft_model_state_dict(skeleton, weights, adapter_name=_ADAPTER)  # torch's _IncompatibleKeys
    foreign = [*result.unexpected_keys, *(key for key in result.missing_keys if f".{_ADAPTER}." in key)]
    if foreign:
        raise UnusableLora(
            f"it was made for another base model (the models differ in {foreign[0]}); use it with that model"
        )
    return {
        name: LoraDelta(
            layer.lora_A[_ADAPTER].get_parameter("weight").detach().to(model.dtype),
            layer.lora_B[_ADAPTER].get_parameter("weight").detach().to(model.dtype),
            float(layer.scaling[_ADAPTER]),
        )
        for name, layer in layers.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Base:
    """A model without weights into which peft injects an adapter, and its names for the parts of the whole model.

    *prefixes* has the names' beginnings in the whole model, by those in *skeleton*.
    """

    skeleton: torch.nn.Module
    prefixes: Mapping[str, str]

    def name_in_model(self, name: str) -> str:
        """Return the name that a layer or weight of the skeleton has in the whole model."""
        for prefix, in_model in self.prefixes.items():
            if name == prefix or name.startswith(f"{prefix}."):
                return in_model + name[len(prefix) :]
        return name


class _TextLayers(torch.nn.Module):
    """The text layers of a model with an image encoder, under their names in the class without an encoder."""

    base_model_prefix = "model"  # where peft looks for the decoder

    def __init__(self, decoder: torch.nn.Module, output: torch.nn.Module) -> None:
        super().__init__()
        self.model = decoder
        self.lm_head = output
        self.config = decoder.config


def _base_of(weights: Mapping[str, torch.Tensor], model: PreTrainedModel) -> _Base:
    """Return the skeleton whose layers have the names of an adapter's *weights*.

    This is the whole model, or its text layers if the adapter was trained on the model's class without an encoder. If
    both lack one of the names, the whole model is returned.
    """
    whole = _without_weights(model)
    names = {name for name, _ in whole.named_modules()}
    wanted = {_layer_name(name) for name in weights if ".lora_" in name}
    decoder, output = whole.get_decoder(), whole.get_output_embeddings()  # type: ignore[no-untyped-call]
    if wanted <= names or decoder is whole or output is None:
        return _Base(whole, {})
    text = _TextLayers(decoder, output)
    if not wanted <= {name for name, _ in text.named_modules()}:
        return _Base(whole, {})
    in_model = {module: name for name, module in whole.named_modules()}
    return _Base(text, {"model": in_model[decoder], "lm_head": in_model[output]})


def _layer_name(name: str) -> str:
    """Return the name of the layer, or else of the base weights, to which peft's weights of this *name* belong."""
    return name.removeprefix("base_model.model.").partition(".lora_")[0].replace(".base_layer.", ".")


def _check_plain(config: "PeftConfig") -> None:
    """Raise `UnusableLora` if an adapter's configuration changes more than the outputs of linear layers."""
    from peft import LoraConfig

    if type(config) is not LoraConfig:
        raise UnusableLora(f"its peft_type is {config.peft_type}, and kvtier supports only LORA")
    more = {
        "bias": config.bias != "none",
        "init_lora_weights": isinstance(config.init_lora_weights, str) and config.init_lora_weights not in PLAIN_INITS,
        "layer_replication": config.layer_replication,
        "modules_to_save": config.modules_to_save,
        "target_parameters": config.target_parameters,
        "trainable_token_indices": config.trainable_token_indices,
        "use_dora": config.use_dora,
    }
    for field, is_used in more.items():
        if is_used:
            value = getattr(config, field)
            raise UnusableLora(
                f"{field} = {value!r} changes more than a LoRA does; merge the adapter into its base model"
            )


def _check_same(model: PreTrainedModel, name: str, saved: torch.Tensor) -> None:
    """Raise `UnusableLora` if base weights that were saved with the adapter differ from the model's *name*."""
    own = dict(model.named_parameters(remove_duplicate=False)).get(name)
    # A model without weights (`kvtier serve --check-config`) can only be compared by shape.
    is_same = own is not None and own.shape == saved.shape and (own.is_meta or torch.equal(saved.to(own), own))
    if not is_same:
        raise UnusableLora(
            f"it was saved with other weights of {name} than this model has; merge the adapter into its own base model"
        )


def _without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model with parameters and buffers on the meta device, which takes no memory."""
    memo: dict[int, object] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for weights in model.parameters():
        memo[id(weights)] = torch.nn.Parameter(weights.detach().to("meta"), requires_grad=False)
    return copy.deepcopy(model, memo)


def _line(error: BaseException) -> str:
    """Return the most informative line of an error message of torch or peft.

    This is the first line that names a layer whose weights have another shape, or else the first line.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return next((line for line in lines if line.startswith("size mismatch")), lines[0])
