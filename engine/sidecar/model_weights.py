"""Which weights an engine means by a model's name, as far as the operator has said so."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from kvtier.engine.sidecar.config import ModelWeightsConfig

SUFFIXES = {".safetensors", ".gguf", ".bin", ".pt", ".pth"}
BESIDE = {"config.json", "generation_config.json", "quantize_config.json", "quantization_config.json"}


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


def weights_digest(path: Path) -> str:
    """Of a file of weights, or of all of them in a folder with the configuration beside them: sha256, as text."""
    files = [path] if path.is_file() else sorted(p for p in path.glob("**/*") if _counts(p))
    if not any(file.suffix in SUFFIXES for file in files):
        raise ValueError(
            f"models: {path} has no weights ({', '.join(sorted(SUFFIXES))}); give their folder, or revision"
        )
    running = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            content = hashlib.file_digest(opened, "sha256").digest()
        name = file.name.encode() if file == path else str(file.relative_to(path)).encode()
        running.update(len(name).to_bytes(4, "little") + name + content)
    return f"sha256 {running.hexdigest()}"


def _counts(path: Path) -> bool:
    return path.is_file() and (path.suffix in SUFFIXES or path.name in BESIDE)
