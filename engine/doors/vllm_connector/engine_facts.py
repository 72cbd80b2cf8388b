"""What decides the bytes of an engine's blocks beside its prompts and the shapes of its groups."""

from pathlib import Path
from typing import Any

import torch

from kvtier.engine.attached.model_files import weights_digest
from kvtier.engine.doors.vllm_connector.engine_layout import NotServed


def engine_facts(vllm_config: Any, kv_cache_config: Any, weights: str | None, weights_key: str) -> dict[str, object]:
    """Facts of this engine, by name. Rather too much than too little: a block of another namespace is computed again.

    *weights* stands for the model's weights; without it their digest is taken. `NotServed`, which tells people to set
    *weights_key*, if nothing says which weights the engine has.
    """
    from vllm import __version__ as vllm_version
    from vllm.platforms import current_platform

    model, cache = vllm_config.model_config, vllm_config.cache_config
    return {
        "vllm": vllm_version,  # kernels may pack a block's bytes in another order
        "weights": weights or _weights(model, weights_key),
        "load_format": str(vllm_config.load_config.load_format),
        "config": model.hf_config.to_json_string(use_diff=False),
        "max_model_len": model.max_model_len,  # some rotary embeddings depend on it
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "hash": cache.prefix_caching_hash_algo,
        "hash_tokens": kv_cache_config.hash_block_size,
        "kv_cache_layout": str(kv_cache_config.kv_cache_layout),
        "attention": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        "platform": [current_platform.device_type, current_platform.get_device_name(), _instructions()],
        "ranks": vllm_config.parallel_config.tensor_parallel_size,
    }


def _instructions() -> str:
    """Kernels for processors choose the order of a block's bytes by what the processor can do."""
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    return f"{torch.backends.cpu.get_cpu_capability()} {'amx' if has_amx else ''}"


def _weights(model: Any, weights_key: str) -> str:
    """The digest of the model's files, wherever vLLM loads them from."""
    path = Path(model.model)
    try:
        if not path.exists():
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
        return weights_digest(path)
    except (OSError, ValueError) as error:
        raise NotServed(
            f"nothing says which weights {model.model} has ({error}); say it with {weights_key}, such as a revision"
        ) from None
