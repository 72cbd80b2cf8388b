"""Layer: queries, keys, values and output of one layer in one step, as kernels read and write them."""

from dataclasses import dataclass

import numpy as np
import torch

from kvtier.engine.model.paged_gather import Scoring


@dataclass(frozen=True, slots=True)
class Layer:
    """Valid in the pass that it is made in. Floats are float32, but keys and values may be bfloat16, as uint16."""

    number: int  # within its group
    queries: np.ndarray  # [num_tokens, num_heads, head_dim]
    halves: np.ndarray  # [num_slots * group_layers * 2, block_size, num_kv_heads, head_dim]
    scale: float
    softcap: float  # 0: none
    sinks: np.ndarray  # [num_heads]; empty: none
    output: np.ndarray  # [num_tokens, num_heads, head_dim]


def layer_of(query: torch.Tensor, slab: torch.Tensor, number: int, scoring: Scoring, output: torch.Tensor) -> Layer:
    """The layer of tensors on a CPU. *query*: [1, num_heads, num_tokens, head_dim]. *output*, float32 in any case, is
    written to; queries and slab are read where they are, if they are float32 in a row.
    """
    bits = slab if slab.dtype == torch.float32 else slab.view(torch.uint16)
    return Layer(
        number,
        query[0].transpose(0, 1).float().contiguous().numpy(),
        bits.view(-1, *slab.shape[3:]).numpy(),
        scoring.scale,
        scoring.softcap or 0.0,
        np.empty(0, np.float32) if scoring.sinks is None else scoring.sinks.detach().float().numpy(),
        output.numpy(),
    )
