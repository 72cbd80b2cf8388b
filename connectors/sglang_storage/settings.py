"""`--hicache-storage-backend-extra-config` of the backend."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvtier.engine.config import DiskConfig, tree_from_dict

# What SGLang reads in the same table.
_OF_SGLANG = {"backend_name", "module_path", "class_name", "interface_v1"}


class StorageSettings(DiskConfig, frozen=True, kw_only=True):
    """The keys of `[disk]`, and *weights*: what stands for the model's weights, whose digest is taken otherwise."""

    weights: Annotated[str, msgspec.Meta(min_length=1)] | None = None


def settings_of(extra_config: Mapping[str, object]) -> StorageSettings:
    """The settings. ValueError, with the key, for what they may not say."""
    own = {key: value for key, value in extra_config.items() if key not in _OF_SGLANG}
    return tree_from_dict(StorageSettings, own, "hicache-storage-backend-extra-config")
