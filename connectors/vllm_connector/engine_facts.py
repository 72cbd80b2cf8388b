"""The facts about a vLLM engine, such as its weights and options, that decide the bytes of its blocks."""

from pathlib import Path
from typing import Any

import torch

from kvtier.connectors.judged_options import read_attribute
from kvtier.connectors.vllm_connector.drafters import drafter_facts
from kvtier.connectors.vllm_connector.engine_layout import UnsupportedEngine
from kvtier.connectors.vllm_connector.options import JUDGED, length_facts
from kvtier.engine.attached.model_files import weights_digest


def engine_facts(vllm_config: Any, kv_cache_config: Any, weights: str | None, weights_key: str) -> dict[str, object]:
    """Return the facts about this engine that decide its blocks' bytes, by name.

    *weights* is a name for the model's weights. If it is None, the weights' digest is computed. *weights_key* is the
    name of the operator's setting for *weights*, for error messages.

    Raises:
        UnsupportedEngine: If the weights' digest cannot be computed.
    """
    from vllm import __version__ as vllm_version
    from vllm.platforms import current_platform

    model = vllm_config.model_config

    def weights_of(config: Any) -> str:
        is_of_model = config.model == model.model  # for example, layers for multi-token prediction (MTP)
        return weights if weights and is_of_model else _weights(config, weights_key)

    return {
        **JUDGED.values(lambda path: read_attribute(vllm_config, path)),
        **length_facts(model),
        "vllm": vllm_version,  # kernels of another version may lay out a block's bytes in another order
        **drafter_facts(vllm_config, weights_of),
        "weights": weights_of(model),
        "config": model.hf_config.to_json_string(use_diff=False),
        "hash_tokens": kv_cache_config.hash_block_size,
        "kv_cache_layout": str(kv_cache_config.kv_cache_layout),
        "platform": [current_platform.device_type, current_platform.get_device_name(), _instructions()],
    }


def _instructions() -> str:
    """Return the CPU's instruction sets, which decide in what order vLLM's CPU kernels lay out a block's bytes."""
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    return f"{torch.backends.cpu.get_cpu_capability()} {'amx' if has_amx else ''}"


def _weights(model: Any, weights_key: str) -> str:
    """Return the digest of the model's weights, which are in a folder or in the local cache of the hub."""
    path = Path(model.model)
    try:
        if not path.exists():
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
        return weights_digest(path)
    except (OSError, ValueError) as error:
        raise UnsupportedEngine(
            f"cannot determine which weights {model.model} has ({error}); set {weights_key}, for example to a revision"
        ) from None
