"""The digest of a model's or adapter's files, which identifies weights that have not been loaded yet."""

import hashlib
from pathlib import Path

SUFFIXES = {".safetensors", ".gguf", ".bin", ".pt", ".pth"}
BESIDE = {
    *("config.json", "generation_config.json", "quantize_config.json", "quantization_config.json"),
    "adapter_config.json",  # an adapter's ranks and scales
}


def weights_digest(path: Path) -> str:
    """Return the sha256, as text, of a file of weights, or of all weights and configuration files in a folder.

    Raises:
        ValueError: If *path* has no weights.
    """
    files = weight_files(path)
    if not any(file.suffix in SUFFIXES for file in files):
        raise ValueError(
            f"models: {path} has no weights ({', '.join(sorted(SUFFIXES))}); give the folder of the weights, or give "
            "revision instead"
        )
    running = hashlib.sha256()
    for file in files:
        content = bytes.fromhex(digest_of_file(file))
        name = file.name.encode() if file == path else str(file.relative_to(path)).encode()
        running.update(len(name).to_bytes(4, "little") + name + content)
    return f"sha256 {running.hexdigest()}"


def digest_of_file(path: Path) -> str:
    """Return the sha256 of a file, as text."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def weight_files(path: Path) -> list[Path]:
    """Return the files that `weights_digest` reads, in the order in which it reads them."""
    return [path] if path.is_file() else sorted(found for found in path.glob("**/*") if _counts(found))


def _counts(path: Path) -> bool:
    return path.is_file() and (path.suffix in SUFFIXES or path.name in BESIDE)
