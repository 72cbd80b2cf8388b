"""Index keys of sparse attention (DSA): a layer's indexer scores a request's keys, and attention reads only the best.

The indexer is a module inside the layer's attention. It keeps one short index key of each token, which lies at the end
of the token's latent row. For each token it returns the positions of the keys that the layer reads. Later layers may
read the keys that an earlier layer chose, and have no indexer then.

An indexer scores every token of a batch against every key that it is given, once for each of its heads. In DeepSeek
V3.2, that takes 256 bytes for each pair of a token and a key. So kvtier calls an indexer for parts of the batch
(`IndexCall`).

Negative products count as 0, so with few heads many index scores are equal, and the choice between equal keys is
arbitrary. With 4 heads, transformers itself chooses other keys when it decodes than when it computes a whole prompt.
With 16 heads or more, equal scores were not seen.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvtier.engine.model.errors import UnsupportedModel
from kvtier.engine.model.paged_segment import Segment, reads, rows_of, segment

# Pairs of a token and a key that an indexer scores in one call, or more if a single token has more keys. A tensor of
# scores then takes 256 MiB with 64 heads.
MAX_PAIRS = 1 << 20
LATER = torch.iinfo(torch.int32).max  # in place of the position of a chosen key, if the token must not read this key
INDEXED = "indexed_attention"  # transformers' name for this kind of layer, in a configuration's `layer_types`


@dataclass(frozen=True, slots=True)
class IndexCall:
    """The consecutive tokens of a batch that one call of an indexer covers. Each of the *parts* is one request's."""

    parts: tuple[Segment, ...]

    @property
    def rows(self) -> slice:
        """The tokens' rows of the batch."""
        return slice(self.parts[0].rows.start, self.parts[-1].rows.stop)

    @property
    def num_pairs(self) -> int:
        """Number of pairs of a token and a key that the indexer scores, those of two requests included."""
        return sum(part.num_queries for part in self.parts) * sum(part.num_keys for part in self.parts)

    def keys(self, kept: torch.Tensor) -> torch.Tensor:
        """Return the index keys of all parts, one after the other: [keys, width].

        *kept* holds the layer's index keys, [num_slots, block_size, width].
        """
        return torch.cat([rows_of(kept, part) for part in self.parts])

    def mask(self) -> torch.Tensor:
        """Return the mask [1, tokens, keys], True where a token may read a key: of its own request, and not later."""
        device, num_tokens = self.parts[0].device, self.rows.stop - self.rows.start
        mask = torch.zeros(1, num_tokens, sum(part.num_keys for part in self.parts), dtype=torch.bool, device=device)
        first = 0
        for part in self.parts:
            queries = torch.arange(part.start, part.end, device=device)[:, None]
            keys = torch.arange(part.num_keys, device=device)[None, :]
            mask[0, self._own_rows(part), first : first + part.num_keys] = reads(part.group, queries, keys)
            first += part.num_keys
        return mask

    def positions(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the positions of chosen keys in the requests' prompts, given their *indices* among all keys.

        Both are [tokens, chosen keys]. A position is LATER where an indexer that has too few keys of the token's own
        request chose a key of another request. A position may be after the token's own.
        """
        positions, first = [], 0
        for part in self.parts:
            of_part = indices[self._own_rows(part)] - first
            is_own = (of_part >= 0) & (of_part < part.num_keys)
            positions.append(of_part.masked_fill(~is_own, LATER))
            first += part.num_keys
        return torch.cat(positions)

    def _own_rows(self, part: Segment) -> slice:
        """Return the rows of a part, counted from the first row of the call."""
        return slice(part.rows.start - self.rows.start, part.rows.stop - self.rows.start)


def index_calls(segments: Sequence[Segment]) -> list[IndexCall]:
    """Divide a batch into calls of at most `MAX_PAIRS` pairs each, or of one token if it has more keys than that."""
    calls: list[IndexCall] = []
    for part in (piece for whole in segments for piece in _pieces(whole)):
        together = IndexCall((*calls[-1].parts, part)) if calls else None
        if together is not None and together.num_pairs <= MAX_PAIRS:
            calls[-1] = together
        else:
            calls.append(IndexCall((part,)))
    return calls


def _pieces(part: Segment) -> Iterator[Segment]:
    """Yield the segment in pieces of consecutive tokens. A piece has the keys up to its last token."""
    num_tokens = max(1, MAX_PAIRS // part.num_keys)
    for first in range(0, part.num_queries, num_tokens):
        number = min(num_tokens, part.num_queries - first)
        row = part.rows.start + first
        yield segment(part.group, part.table, slice(row, row + number), part.start + first, number, part.device)


class IndexStep:
    """The state of the indexers in one forward pass."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Create the state of a pass over these *segments*, each one request's tokens."""
        self._calls = index_calls(segments)
        self._current: IndexCall | None = None
        num_tokens = segments[-1].rows.stop
        # Given to the model as its mask. Each call of an indexer gets a mask of its own instead.
        self.mask = torch.ones((1, 1, num_tokens, 1), dtype=torch.bool, device=segments[-1].device)

    def run(self, indexer: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        """Call the *indexer* for each part of the batch, and return the chosen positions, [1, tokens, chosen keys].

        Every tensor among the arguments is cut to the tokens of a call, and the mask is replaced. If a request has at
        most as many tokens as the result has columns, all its keys were chosen.
        """
        chosen = []
        for call in self._calls:
            self._current = call
            try:
                indices = indexer(*(self._cut(arg) for arg in args), **{k: self._cut(v) for k, v in kwargs.items()})
            finally:
                self._current = None
            num_tokens = call.rows.stop - call.rows.start
            if not _are_indices(indices, num_tokens):
                raise UnsupportedModel("it has an indexer that does not return the indices of the keys that it chose")
            chosen.append(call.positions(indices[0]))
        width = max(of_call.shape[1] for of_call in chosen)
        padded = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=LATER) for part in chosen]
        return torch.cat(padded)[None]

    def receive(
        self, keys: torch.Tensor, kept: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """Write the index *keys* of the current call's tokens to *kept*, and return those of all its requests.

        Args:
            keys: Index keys, [1, tokens, width].
            kept: The layer's index keys, [num_slots, block_size, width].
            slots: The slot of each token of the batch.
            offsets: Each token's position in its block.
        """
        if self._current is None:
            raise UnsupportedModel("it updates index keys outside of an indexer")
        rows = self._current.rows
        kept[slots[rows], offsets[rows]] = keys[0]
        return self._current.keys(kept)[None]

    def _cut(self, value: Any) -> Any:
        """Return the rows of the current call of *value*: a tensor [1, tokens, ...], a tuple of such, or another."""
        call, num_tokens = self._current, self._calls[-1].rows.stop
        assert call is not None, "no call"
        if isinstance(value, tuple):
            return tuple(self._cut(part) for part in value)
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != num_tokens:
            return value
        return call.mask() if value.dtype == torch.bool else value[:, call.rows]


def _are_indices(indices: Any, num_tokens: int) -> bool:
    is_tensor = isinstance(indices, torch.Tensor) and indices.dim() == 3
    return is_tensor and indices.shape[:2] == (1, num_tokens) and not indices.is_floating_point()


class CutIndexer:
    """A replacement for the `forward` of one indexer while a pass runs.

    The code that detects changes of the model allows this class.
    """

    def __init__(self, forward: Callable[..., Any], step: IndexStep) -> None:
        self._forward = forward
        self._step = step

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the positions of the keys that each token of the batch reads, [1, tokens, chosen keys] int32."""
        return self._step.run(self._forward, args, kwargs)


class Indexers:
    """The indexers of a model's layers. Owned by the engine's thread.

    Raises:
        UnsupportedModel: If a layer with index keys has no indexer, or more than one.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Collection[int]) -> None:
        """Find the indexers of the layers *layer_ids*."""
        self.modules = [_indexer(model, layer_id) for layer_id in layer_ids]

    @contextmanager
    def on(self, step: IndexStep | None) -> Iterator[None]:
        """Call the indexers by parts of the batch in the pass that runs in the context.

        *step* is None if no layer has index keys.
        """
        if step is None:
            yield
            return
        before = [(vars(module), vars(module).get("forward")) for module in self.modules]
        try:
            for module in self.modules:
                vars(module)["forward"] = CutIndexer(module.forward, step)
            yield
        finally:
            for own, forward in before:
                own.pop("forward", None)
                if forward is not None:
                    own["forward"] = forward


def _indexer(model: PreTrainedModel, layer_id: int) -> torch.nn.Module:
    attentions = [module for module in model.modules() if hasattr(module, "expand_kv") and _is_of(module, layer_id)]
    found = [
        module
        for attention in attentions
        for module in attention.modules()
        if module is not attention and _is_of(module, layer_id)
    ]
    if len(found) != 1:
        raise UnsupportedModel(
            f"layer {layer_id} keeps index keys and has {len(found)} modules that may be its indexer"
        )
    return found[0]


def chooses_keys(model: PreTrainedModel) -> bool:
    """Return whether the model's configuration says that some of its layers choose the keys that they read."""
    return INDEXED in (getattr(model.config.get_text_config(), "layer_types", None) or ())


def _is_of(module: torch.nn.Module, layer_id: int) -> bool:
    return getattr(module, "layer_idx", None) == layer_id
