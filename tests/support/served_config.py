"""The configuration of a server process."""

from pathlib import Path

CONFIG = """
[device]
capacity = "8MiB"
block_size = 16

[host]
capacity = "8MiB"

[disk]
path = "{folder}/store"
capacity = "64MiB"

[scheduler]
load = "always"

"""


def configured(folder: Path) -> str:
    return CONFIG.format(folder=folder)
