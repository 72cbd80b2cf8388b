"""The check at load that a prompt with an image gives the same logits with kvtier as with the model alone."""

from itertools import pairwise

import torch

from kvtier.engine.images.encoder import ImageEncoder
from kvtier.engine.images.families import MROPE_TYPES
from kvtier.engine.images.image_prompt import PreparedPrompt
from kvtier.engine.images.preparer import ImagePreparer
from kvtier.engine.images.prompt_images import PromptImages
from kvtier.engine.model.check import STATES_EACH, TOLERANCE, check_tables, compare
from kvtier.engine.model.image_rows import ImageRows
from kvtier.engine.model.paged_model import Chunk, PagedModel

SIZE = (96, 64)  # of the image, whose sides differ so that swapped positions are seen
NUM_BEFORE = 5  # tokens before the image
NUM_AFTER = 7


def check_images(
    paged: PagedModel, preparer: ImagePreparer, encoder: ImageEncoder, **options: object
) -> tuple[int, int] | None:
    """Compare the logits of a prompt with an image with those of the model's own code, and return the rows' shape.

    kvtier computes the prompt as chunks, of which two cut the image. *options* are passed to the image processor, to
    get an image of few tokens. Returns (1 + num_deep, hidden) of the encoder's rows, or None, with nothing compared,
    if the device pool has too few blocks for the prompt.

    Raises:
        UnsupportedModel: If the logits differ by more than rounding errors.
        ImageError: If the image processor cannot be used.
    """
    from PIL import Image

    model = paged.model
    plain = bytes((17 * i * i + 5 * i) % 251 for i in range(3 * SIZE[0] * SIZE[1]))
    image = preparer.prepare(Image.frombytes("RGB", SIZE, plain), **options)
    asked = [token_id for token_id in range(3, 3 + NUM_BEFORE + NUM_AFTER + 1) if token_id != preparer.image_token_id]
    token_ids = [*asked[:NUM_BEFORE], preparer.image_token_id, *asked[NUM_BEFORE : NUM_BEFORE + NUM_AFTER]]
    prompt = preparer.place(token_ids, [image])
    assert prompt.images is not None, "the prompt has an image"
    num_tokens = len(prompt.token_ids)
    num_blocks = -(-num_tokens // paged.block_size)
    if num_blocks > paged.num_slots:
        return None
    rows = encoder.encode(image)
    tables = check_tables(paged, list(range(num_blocks))[::-1], range(STATES_EACH))
    places = prompt.images.placed[0].places
    cuts = (0, int(places[len(places) // 3]), int(places[len(places) // 2]) + 1, num_tokens - 1, num_tokens)
    for start, end in pairwise(sorted(set(cuts))):
        chunk = Chunk(prompt.token_ids[start:end], start, tables, images=_part(prompt.images, rows, start, end))
        logits = paged.run([chunk])
    compare(model, logits, _own_logits(paged, prompt, prompt.images)[-1:], TOLERANCE.get(model.dtype, 0.1))
    return rows.shape[0], rows.shape[2]


def _part(images: PromptImages, rows: torch.Tensor, start: int, end: int) -> ImageRows:
    within = images.placed[0].rows_in(start, end)
    places = torch.from_numpy(images.placed[0].places[within.start : within.stop]) - start
    return ImageRows(places, rows[:, within.start : within.stop], images.positions(start, end))


def _own_logits(paged: PagedModel, prompt: PreparedPrompt, images: PromptImages) -> torch.Tensor:
    """Return the logits of the model's own code, which encodes the image itself, [num_tokens, vocab]."""
    model = paged.model
    ids = torch.tensor([prompt.token_ids], device=model.device)
    inputs = {name: tensor.to(model.device) for name, tensor in images.placed[0].image.inputs.items()}
    if model.config.model_type in MROPE_TYPES:
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    before = getattr(model.model, "rope_deltas", None)
    with paged.claim.own_attention(), torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, **inputs).logits
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = before  # which the model's code notes for its next call
    return logits[0].float()
