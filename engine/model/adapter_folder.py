"""A check of a LoRA adapter's folder, which does not import torch.

The import takes seconds, and a command that is given a wrong folder should fail earlier.
"""

from pathlib import Path

from kvtier.extras import require_packages

CONFIG_FILE = "adapter_config.json"


class UnusableLora(ValueError):
    """An error for an adapter that cannot be served with this model. Its message says why, in one line."""


def check_adapter_folder(name: str, folder: Path) -> None:
    """Raise `UnusableLora` if *folder* holds no adapter, or `MissingExtra` if peft is not installed."""
    require_packages(["peft"], "lora", f"lora {name}", "or remove the [lora] tables")
    if not folder.is_dir():
        raise UnusableLora(f"lora {name}: there is no folder {folder}; give the one that peft's save_pretrained wrote")
    if not (folder / CONFIG_FILE).is_file():
        raise UnusableLora(
            f"lora {name}: {folder} is no adapter (it has no {CONFIG_FILE}); "
            "give the folder that peft's save_pretrained wrote"
        )
