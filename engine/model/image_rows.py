"""ImageRows: the rows and positions that a chunk of a prompt with images has in place of its tokens' own."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """The image part of a chunk: the encoder's rows of its image tokens, and the positions of all of its tokens.

    `rows[0]` are the embeddings of the image tokens. `rows[1:]` are added to the hidden states after the first layers,
    one for each layer, in models that do so ("deepstack").
    """

    places: torch.Tensor  # [num_image_tokens] int64: indices of the image tokens in the chunk, ascending
    rows: torch.Tensor  # [1 + num_deep, num_image_tokens, hidden]
    positions: torch.Tensor | None = None  # [3, num_tokens] int64, for M-RoPE; None: the tokens' plain positions


@dataclass(frozen=True, slots=True)
class EncodedImages:
    """The encoder's output in the form in which a model's `forward` takes it, for the tokens of one pass."""

    pooler_output: list[torch.Tensor]
    deepstack_features: list[list[torch.Tensor]]

    def to_tuple(self) -> tuple[object, ...]:
        """Return the fields, as the outputs of transformers' models do."""
        return self.pooler_output, self.deepstack_features


def image_arguments(
    model: PreTrainedModel, token_ids: torch.Tensor, lengths: Sequence[int], chunks: Sequence[ImageRows | None]
) -> dict[str, object]:
    """Return the arguments of the model's `forward` that a pass needs in addition because of its *chunks*' images.

    *token_ids*, [num_tokens], are the tokens of the chunks, which have these *lengths*. A token that has the id of an
    image's placeholder, but belongs to no image, keeps its own embedding. A client may have written such a token, or
    the model may have generated it.
    """
    marked = torch.nonzero(token_ids == model.config.image_token_id)[:, 0]
    given = [(start, each) for start, each in _with_starts(lengths, chunks) if each is not None and len(each.places)]
    if not given:  # no image tokens in this pass: marked tokens have their own embeddings anyway
        return {}
    embedding = model.get_input_embeddings()
    depth, _, width = given[0][1].rows.shape
    rows = embedding.weight.new_zeros(depth, len(token_ids), width)  # type: ignore[operator]  # a tensor
    rows[0, marked] = embedding(token_ids[marked])
    for start, each in given:
        rows[:, start + each.places.to(rows.device)] = each.rows.to(rows.device, rows.dtype)
    first, *deep = rows[:, marked].unbind()
    return {"mm_encoder_outputs": {"image": EncodedImages([first], [[each] for each in deep])}}


def rope_positions(positions: torch.Tensor, lengths: Sequence[int], chunks: Sequence[ImageRows | None]) -> torch.Tensor:
    """Return the position ids of a pass: [1, num_tokens], or [3, 1, num_tokens] if a chunk has positions for M-RoPE.

    *positions*, [num_tokens], are the tokens' plain positions.
    """
    if all(each is None or each.positions is None for each in chunks):
        return positions[None]
    spread = positions.expand(3, -1).clone()
    for (start, each), length in zip(_with_starts(lengths, chunks), lengths, strict=True):
        if each is not None and each.positions is not None:
            spread[:, start : start + length] = each.positions.to(spread.device)
    return spread[:, None]


def _with_starts(lengths: Sequence[int], chunks: Sequence[ImageRows | None]) -> list[tuple[int, ImageRows | None]]:
    """Return each chunk with the index of its first token in the pass."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    return list(zip(starts, chunks, strict=True))
