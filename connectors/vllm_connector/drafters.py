"""Speculative decoding: which drafters the connector supports, and which of their facts decide the bytes of blocks."""

from collections.abc import Callable
from typing import Any

from kvtier.connectors.vllm_connector.engine_layout import UnsupportedEngine

WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")  # drafters that compute no keys and values
WITH_LAYERS = ("eagle", "eagle3", "mtp", "draft_model")  # drafters whose layers are in vLLM's KV cache groups


def check_drafter(vllm_config: Any) -> None:
    """Raise `UnsupportedEngine` if the connector does not support the engine's way of speculative decoding."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in WITHOUT_LAYERS:
        return
    if speculative.method not in WITH_LAYERS:
        raise UnsupportedEngine(
            f'the connector does not serve speculative decoding by "{speculative.method}"; it serves '
            f"{', '.join(WITHOUT_LAYERS + WITH_LAYERS)}"
        )
    draft_ranks = speculative.draft_tensor_parallel_size
    if draft_ranks not in (None, vllm_config.parallel_config.tensor_parallel_size):
        raise UnsupportedEngine(
            "the connector does not serve a drafter that only some tensor parallel ranks compute; set "
            '"draft_tensor_parallel_size" of --speculative-config to --tensor-parallel-size'
        )


def depends_on_next(vllm_config: Any) -> bool:
    """Return whether the layers of the engine's drafter depend on the next token, as with EAGLE and MTP."""
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.use_eagle_block_drop())


def drafter_facts(vllm_config: Any, weights_of: Callable[[Any], str]) -> dict[str, object]:
    """Return the facts about the drafter that decide the bytes of its layers' blocks, by name.

    The dict is empty if the drafter has no layers. *weights_of* returns the digest of the weights of one of vLLM's
    `ModelConfig` objects.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or speculative.method not in WITH_LAYERS:
        return {}
    draft = speculative.draft_model_config
    return {
        "drafter": speculative.method,
        "drafter's weights": weights_of(draft),
        "drafter's config": draft.hf_config.to_json_string(use_diff=False),
        "drafter's type": str(draft.dtype),
        "drafter's quantization": str(draft.quantization),
    }
