"""The configuration of the SGLang server that this process belongs to, as far as it decides the bytes of pages."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvtier.connectors.sglang_storage.known_sglang import TESTED, UnsupportedEngine
from kvtier.connectors.sglang_storage.options import JUDGED
from kvtier.engine.attached.model_files import digest_of_file, weights_digest


def server_facts(read: Callable[[str], object]) -> dict[str, object]:
    """Return the options, quantization scales, adapters and draft model that decide pages on all ranks, by name.

    Args:
        read: Returns the value of one of the server's options, as SGLang has resolved it.

    Raises:
        UnsupportedEngine: If a file that an option names cannot be read.
    """
    scales = read("quantization_param_path")
    draft = read("speculative_draft_model_path")
    has_own_draft = draft is None or draft == read("model_path")  # then the digest of the model's weights covers it
    return {
        **JUDGED.values(read),
        "scales": None if scales is None else _digest("quantization_param_path", str(scales), digest_of_file),
        "adapters": sorted(
            [name, _digest("lora_paths", path, lambda file: weights_digest(folder_of_model(str(file))))]
            for name, path in _adapters(read("lora_paths"))
        ),
        **({} if has_own_draft else {"draft": _draft_digest(str(draft), read("speculative_draft_model_revision"))}),
    }


def option_reader() -> Callable[[str], object]:
    """Return a function that returns the value of a server option, or None if the option does not exist.

    Raises:
        UnsupportedEngine: If the options cannot be read from this version of SGLang.
    """
    try:
        from sglang.srt.runtime_context import get_server_args

        arguments: Any = get_server_args()
        return dict(arguments.resolved_dict()).get
    except (ImportError, AttributeError, ValueError) as error:
        raise UnsupportedEngine(
            f"this SGLang does not reveal its options ({error}), which decide what its pages contain; "
            f"install a tested version: {', '.join(TESTED)}"
        ) from None


def weights_version() -> str | None:
    """Return SGLang's version label of its current weights, or None if this SGLang has no such label."""
    try:
        from sglang.srt.runtime_context import get_serving

        return str(get_serving().weight_version)
    except (ImportError, AttributeError, ValueError):
        return None


def folder_of_model(name: str, revision: str | None = None) -> Path:
    """Return the folder of a model or adapter, given a path or the hub id of a downloaded snapshot."""
    if name and Path(name).exists():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, local_files_only=True))


def _adapters(paths: object) -> Iterable[tuple[str, str]]:
    """Yield the name and the path of each adapter of `--lora-paths`, in any of the forms that SGLang accepts."""
    if isinstance(paths, dict):
        yield from ((str(name), _path_of(value)) for name, value in paths.items())
        return
    for each in paths if isinstance(paths, list | tuple) else ():
        if isinstance(each, str):
            name, equals, path = each.partition("=")
            yield (name, path) if equals else (each, each)
        else:
            yield str(_field(each, "lora_name")), _path_of(each)


def _path_of(adapter: object) -> str:
    return adapter if isinstance(adapter, str) else str(_field(adapter, "lora_path"))


def _field(adapter: object, name: str) -> object:
    return adapter.get(name) if isinstance(adapter, dict) else getattr(adapter, name, None)


def _draft_digest(path: str, revision: object) -> str:
    name = None if revision is None else str(revision)
    return _digest("speculative_draft_model_path", path, lambda file: weights_digest(folder_of_model(str(file), name)))


def _digest(option: str, path: str, digest: Callable[[Path], str]) -> str:
    try:
        return digest(Path(path))
    except (OSError, ValueError, ImportError) as error:
        raise UnsupportedEngine(
            f"{option}: {path} cannot be read ({error}), but decides what pages contain; give a path on this machine"
        ) from None
