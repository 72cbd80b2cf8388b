"""Early checks of a command's model and files. They report errors before torch is imported, which takes seconds.

The checks reject only input that is sure to fail later. Other errors are reported when the input is loaded.
"""

import ctypes
import json
from pathlib import Path

from kvtier.engine.config import Config
from kvtier.engine.model.adapter_folder import CONFIG_FILE, check_adapter_folder
from kvtier.engine.model.checkpoint import Checkpoint
from kvtier.engine.observability.records.request_log import refuse_unusable
from kvtier.store.codec.cipher import Cipher

_WEIGHTS = ("*.safetensors", "*.bin")


def check_model(name: str) -> None:
    """Raise ValueError for a model that cannot be loaded: a path that does not exist, or a folder without a model."""
    checkpoint = Checkpoint.of(name)
    why = None if checkpoint.gguf_file is not None else _fault_of(name, Path(checkpoint.source))
    if why is not None:
        raise ValueError(f"model {name}: cannot be loaded ({why}); give a folder, a GGUF file or a name on the hub")


def check_device(config: Config) -> None:
    """Raise ValueError if `gpu_memory_utilization` is set but cannot apply: no GPU driver, or the model on the CPU."""
    is_wanted = config.device.gpu_memory_utilization is not None
    if is_wanted and (config.model.device == "cpu" or not _has_driver()):
        raise config.device.no_gpu()


def check_files(config: Config) -> None:
    """Raise an error if a LoRA adapter, the encryption key, the request log or the document folder is unusable."""
    refuse_unusable(config.request_log)
    for name, table in config.lora.items():
        check_adapter_folder(name, Path(table.path).expanduser())
    if config.disk is not None and config.disk.encryption_key_file is not None:
        Cipher.from_file(Path(config.disk.encryption_key_file).expanduser())
    if config.documents.path is not None:
        folder = Path(config.documents.path)
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not there.is_dir():
            raise OSError(f"documents {folder}: {there} is not a folder; give [documents] another path")


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _fault_of(name: str, folder: Path) -> str | None:
    if not folder.is_dir():
        is_path = name.startswith((".", "/", "~")) or name.count("/") > 1  # other names may be on the hub
        return "there is no such folder" if is_path else None
    if (folder / CONFIG_FILE).is_file():  # an adapter names its base model, which may be on the hub
        return None
    return _fault_in(folder)


def _fault_in(folder: Path) -> str | None:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "the folder has no config.json"
    except OSError as error:
        return f"its config.json: {error.strerror}"
    except ValueError:
        return "its config.json is not valid JSON"
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        return "its config.json has no model_type"
    if not any(True for pattern in _WEIGHTS for _ in folder.glob(pattern)):
        return "the folder has no weights, *.safetensors or *.bin"
    return None
