"""What `secondary_tiers` may say of `KVTier`."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvtier.engine.config import DiskConfig, tree_from_dict


class TierSettings(DiskConfig, frozen=True, kw_only=True):
    """The keys of `[disk]`, and *weights*: what stands for the model's weights, whose digest is taken otherwise."""

    weights: Annotated[str, msgspec.Meta(min_length=1)] | None = None


def tier_settings(config: Mapping[str, object]) -> TierSettings:
    """The settings. ValueError, with the key, for what they may not say."""
    return tree_from_dict(TierSettings, config, "secondary_tiers, KVTier")
