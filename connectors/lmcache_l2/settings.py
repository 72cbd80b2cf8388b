"""`adapter_params` of the adapter."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvtier.engine.config import DiskConfig, tree_from_dict


class Settings(DiskConfig, frozen=True, kw_only=True):
    """What `adapter_params` may say: all of `[disk]`, and *weights*, which stands for what LMCache's keys do not have:
    the revision of the weights, LoRA adapters, how an engine lays its KV out."""

    weights: Annotated[str, msgspec.Meta(min_length=1)] | None = None


def settings_of(adapter_params: Mapping[str, object]) -> Settings:
    """The settings. ValueError, with the key, for what they may not say."""
    return tree_from_dict(Settings, adapter_params, "adapter_params")
