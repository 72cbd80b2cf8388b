"""Early checks of a command's model and files. They report errors before torch is imported, which takes seconds.

The checks reject only input that is sure to fail later. Other errors are reported when the input is loaded.
"""

import ctypes
import json
from collections.abc import Callable
from pathlib import Path

from kvtier.engine.config import Config
from kvtier.engine.machine_limits import refuse_more_than_disk, refuse_more_than_memory
from kvtier.engine.model.adapter_folder import CONFIG_FILE, check_adapter_folder
from kvtier.engine.model.checkpoint import WEIGHTS, Checkpoint
from kvtier.engine.model.hub import source_of
from kvtier.engine.observability.records.request_log import refuse_unusable
from kvtier.store.codec.cipher import Cipher


def check_model(name: str, progress: Callable[[str], None]) -> None:
    """Raise ValueError for a model without a usable configuration: a wrong path, folder, or name on the hub.

    *progress* is called with a line of text before the hub is asked, which may take a few seconds.
    """
    checkpoint = Checkpoint.of(name)
    folder = Path(checkpoint.source)
    if checkpoint.gguf_file is not None:
        return
    if not folder.is_dir():
        progress(f"looking for the model {name}")
        source_of(checkpoint.source)
    elif not (folder / CONFIG_FILE).is_file():  # an adapter names its base model, which may be on the hub
        _refuse(name, _fault_of_config(folder / "config.json"))


def check_weights(name: str) -> None:
    """Raise ValueError if the model *name* is a folder without weights."""
    folder = Path(Checkpoint.of(name).source)
    if not folder.is_dir() or (folder / CONFIG_FILE).is_file() or Checkpoint.of(name).gguf_file is not None:
        return
    if not any(True for pattern in WEIGHTS for _ in folder.glob(pattern)):
        _refuse(name, f"the folder has no weights, {' or '.join(WEIGHTS)}")


def check_device(config: Config) -> None:
    """Raise ValueError if `gpu_memory_utilization` is set but cannot apply: no GPU driver, or the model on the CPU."""
    is_wanted = config.device.gpu_memory_utilization is not None
    if is_wanted and (config.model.device == "cpu" or not _has_driver()):
        raise config.device.no_gpu()


def check_memory(config: Config) -> None:
    """Raise ValueError for a tier in this machine's memory that is larger than the memory."""
    if config.host is not None:
        refuse_more_than_memory("host.capacity", config.host.capacity)
    if config.device.gpu_memory_utilization is None and (config.model.device == "cpu" or not _has_driver()):
        refuse_more_than_memory("device.capacity", config.device.capacity)


def check_disk(config: Config) -> None:
    """Raise ValueError for a disk tier that is larger than the file system of its folder."""
    if config.disk is not None:
        refuse_more_than_disk(config.disk)


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


def _refuse(name: str, why: str | None) -> None:
    if why is not None:
        raise ValueError(f"model {name}: cannot be loaded ({why}); give a folder, a GGUF file or a name on the hub")


def _fault_of_config(file: Path) -> str | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "the folder has no config.json"
    except OSError as error:
        return f"its config.json: {error.strerror}"
    except ValueError:
        return "its config.json is not valid JSON"
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        return "its config.json has no model_type"
    return None
