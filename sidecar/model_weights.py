"""Which weights an engine means by a model's name, as far as the operator has said so."""

from collections.abc import Callable, Mapping
from pathlib import Path

from kvtier.engine.attached.model_files import weights_digest
from kvtier.sidecar.config import ModelWeightsConfig


def weights_of(
    models: Mapping[str, ModelWeightsConfig], progress: Callable[[str], None] = lambda line: None
) -> dict[str, str]:
    """For each model's name a text that is another one for other weights. ValueError for a path without weights."""
    found = {}
    for name, model in models.items():
        if model.path is None:
            found[name] = f"revision {model.revision}"
        else:
            progress(f"taking the digest of the weights in {model.path}")
            found[name] = weights_digest(Path(model.path).expanduser())
    return found
