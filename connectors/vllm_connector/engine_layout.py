"""The layout of vLLM's KV cache groups, and the namespace of its blocks."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, FullAttention, RecurrentState, SlidingWindow

VERSION = 1  # of the contents of a namespace, and of the order of pages in a slot
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class UnsupportedEngine(ValueError):
    """The error for an engine that the connector does not support, with the reason and the remedy.

    It is raised only at startup.
    """


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The layout of the blocks of one of vLLM's KV cache groups.

    A host slot holds one block: first the parts (pages) of all layers on rank 0, in the order of *layer_names*, then
    those on rank 1, and so on. If *num_replicas* consecutive ranks hold equal pages, as with latent attention (MLA),
    the slot has the pages of the first of these ranks only.

    If *depends_on_next* is True, the group has a drafter's layers, whose bytes at the end of a block depend on the
    token after the block.
    """

    attention: AttentionGroup
    layer_names: tuple[str, ...]
    page_bytes: tuple[int, ...]  # size of each layer's page on one rank
    num_ranks: int
    depends_on_next: bool = False
    num_replicas: int = 1

    @property
    def rank_bytes(self) -> int:
        """Number of bytes of a block on one rank."""
        return sum(self.page_bytes)

    @property
    def block_bytes(self) -> int:
        """Number of bytes of a block on all ranks, equal pages counted once."""
        return self.rank_bytes * self.num_ranks // self.num_replicas

    def part_of(self, rank: int) -> slice:
        """Return the bytes of a host slot that have the pages of *rank*."""
        start = rank // self.num_replicas * self.rank_bytes
        return slice(start, start + self.rank_bytes)

    def is_stored_by(self, rank: int) -> bool:
        """Return whether *rank* stores its pages. All ranks load theirs."""
        return rank % self.num_replicas == 0


def _sliding(spec: Any) -> AttentionGroup:
    # vLLM keeps the extra tokens for a drafter, and loads them with the window.
    return SlidingWindow(spec.block_size, spec.sliding_window + spec.extra_retained_tokens)


def _recurrent_state(spec: Any) -> AttentionGroup:
    mode = spec.mamba_cache_mode
    if mode != "align":
        raise UnsupportedEngine(
            f'the connector does not serve recurrent states in mamba_cache_mode "{mode}", in which vLLM does not tell '
            "which page has the state after which token; start vLLM with --mamba-cache-mode align and prefix caching"
        )
    return RecurrentState(spec.block_size)


ATTENTION: Mapping[str, Callable[[Any], AttentionGroup]] = {
    "FullAttentionSpec": lambda spec: FullAttention(spec.block_size),
    "MLAAttentionSpec": lambda spec: FullAttention(spec.block_size),
    "SlidingWindowSpec": _sliding,
    "ChunkedLocalAttentionSpec": lambda spec: ChunkedLocal(spec.block_size, spec.attention_chunk_size),
    "MambaSpec": _recurrent_state,
}
"""Functions that return the attention group for one of vLLM's specs, by the exact name of the spec's class.

Subclasses of these classes are not supported, because they may forget tokens differently.
"""


def _page_bytes(spec: Any) -> int:
    """Return the number of bytes of a page that have contents.

    vLLM pads the page of a recurrent state, so that pages of all groups have one size. The padding is left out.
    """
    if type(spec).__name__ == "MambaSpec":
        return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    return int(spec.page_size_bytes)


def _replicas(spec: Any, num_ranks: int) -> int:
    """Return how many consecutive ranks hold equal pages of a layer."""
    if getattr(spec, "tp_replicated", False):  # a recurrent state that every rank computes
        return num_ranks
    num_parts = getattr(spec, "max_tp_shards", None)  # None if there are no fewer heads than ranks
    return max(1, num_ranks // num_parts) if num_parts else 1


def group_layouts(kv_cache_config: Any, num_ranks: int, depends_on_next: bool = False) -> list[GroupLayout]:
    """Return the layouts of vLLM's groups, in vLLM's order.

    *depends_on_next* is True if the engine has a drafter whose layers depend on the next token. These layers are in the
    groups that vLLM has marked. If vLLM has marked none, they may be in any group, except in groups of recurrent
    states.

    Raises:
        UnsupportedEngine: If a group has layers of an unsupported kind or of several kinds, or if there is no group.
    """
    layouts = []
    has_marks = any(getattr(group, "is_eagle_group", False) for group in kv_cache_config.kv_cache_groups)
    for group in kv_cache_config.kv_cache_groups:
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # for layers of one kind but several sizes
        specs = [by_layer[name] if by_layer else group.kv_cache_spec for name in group.layer_names]
        for kind in sorted({type(spec).__name__ for spec in specs}):
            if kind not in ATTENTION:
                raise UnsupportedEngine(
                    f"the connector does not serve layers of vLLM's kind {kind}; it serves {', '.join(ATTENTION)}"
                )
        attentions = {ATTENTION[type(spec).__name__](spec) for spec in specs}
        if len(attentions) != 1:
            raise UnsupportedEngine(
                "the connector does not serve a KV cache group whose layers have different attention windows; start "
                "vLLM without the connector"
            )
        page_bytes = tuple(map(_page_bytes, specs))
        num_replicas = gcd(num_ranks, *(_replicas(spec, num_ranks) for spec in specs))
        attention, names = attentions.pop(), tuple(group.layer_names)
        is_drafted = depends_on_next and attention.resumes_inside and (group.is_eagle_group or not has_marks)
        layouts.append(GroupLayout(attention, names, page_bytes, num_ranks, is_drafted, num_replicas))
    if not layouts:
        raise UnsupportedEngine("the model has no KV cache; start vLLM without the connector")
    return layouts


def namespace_of(facts: Mapping[str, object], groups: Sequence[GroupLayout], specs: Sequence[object]) -> bytes:
    """Return an engine's namespace: a 16-byte digest of *facts*, *groups* and vLLM's *specs* of the groups."""
    shapes = [
        [
            *(type(group.attention).__name__, repr(group.attention), group.layer_names, group.page_bytes),
            *((group.num_ranks, group.num_replicas) if group.num_replicas > 1 else (group.num_ranks,)),
        ]
        for group in groups
    ]
    everything = {**facts, "version": VERSION, "groups": shapes, "specs": [_ADDRESS.sub("", repr(s)) for s in specs]}
    canonical = json.dumps(everything, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(b"kvtier vllm " + canonical.encode()).digest()[:16]
