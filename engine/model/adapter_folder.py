"""What shows without torch that a folder has no adapter: commands look before they import it, which takes seconds."""

from pathlib import Path

from kvtier.extras import require_packages

CONFIG_FILE = "adapter_config.json"


class UnusableLora(ValueError):
    """An adapter that cannot be served with this model; the message says why, in one line."""


def check_adapter_folder(name: str, folder: Path) -> None:
    """Raise `UnusableLora` if the *folder* of the adapter *name* has no adapter, `MissingExtra` without peft."""
    require_packages(["peft"], "lora", f"lora {name}", "or remove the [lora] tables")
    if not folder.is_dir():
        raise UnusableLora(f"lora {name}: there is no folder {folder}; give the one that peft's save_pretrained wrote")
    if not (folder / CONFIG_FILE).is_file():
        raise UnusableLora(f"lora {name}: {folder} is no adapter (it has no {CONFIG_FILE}); give a folder of peft's")
