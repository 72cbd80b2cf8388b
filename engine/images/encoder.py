"""ImageEncoder: runs the part of a model that turns an image into rows for its image tokens."""

import torch
from transformers import PreTrainedModel

from kvtier.engine.images.image import PreparedImage
from kvtier.engine.model.attention import IMPLEMENTATION
from kvtier.engine.model.errors import UnsupportedModel
from kvtier.engine.model.model_claim import ModelClaim


class ImageEncoder:
    """The image encoder of a model. Only the engine's thread may use it.

    kvtier's attention function, which the rest of the model uses, cannot compute an encoder's attention. So the encoder
    gets the model's own attention function while it runs.
    """

    def __init__(self, model: PreTrainedModel, claim: ModelClaim) -> None:
        self._model = model
        self._claim = claim
        kind = model.config.vision_config.model_type
        self._parts = [
            module
            for module in model.modules()
            if isinstance(module, PreTrainedModel) and module is not model and module.config.model_type == kind
        ]

    @torch.inference_mode()
    def encode(self, image: PreparedImage) -> torch.Tensor:
        """Return the rows of an image in CPU memory, [1 + num_deep, num_rows, hidden]; see `ImageRows`.

        Raises:
            UnsupportedModel: If the encoder gives another number of rows than the image has tokens.
        """
        device = self._model.device
        inputs = {name: tensor.to(device) for name, tensor in image.inputs.items()}
        with self._claim.alone():
            self._set_attention(self._claim.own_attention_name)
            try:
                encoded = self._model.get_image_features(**inputs, return_dict=True)  # type: ignore[operator]
            finally:
                self._set_attention(IMPLEMENTATION)
        deep = [torch.cat(list(rows)) for rows in getattr(encoded, "deepstack_features", None) or ()]
        rows = torch.stack([torch.cat(list(encoded.pooler_output)), *deep])
        if rows.shape[1] != image.num_rows:
            raise UnsupportedModel(
                f"{type(self._model).__name__}: its encoder gives {rows.shape[1]} rows for an image of "
                f"{image.num_rows} tokens"
            )
        return rows.to("cpu", self._model.dtype).contiguous()

    def _set_attention(self, name: str) -> None:
        for part in self._parts:
            part.set_attn_implementation(name)
