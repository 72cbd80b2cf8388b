"""The connector's settings in `kv_connector_extra_config`."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

SOCKET_SCHEME = "unix://"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings that `kv_connector_extra_config` may have.

    *sidecar* is the path of the sidecar's own socket. *deadline_ms* limits how long a request waits for its prefix.
    *weights* identifies the model's weights; without it their digest is computed.
    """

    sidecar: Annotated[str, msgspec.Meta(min_length=1)]
    deadline_ms: Annotated[float, msgspec.Meta(gt=0, le=60_000)] = 300.0
    weights: Annotated[str, msgspec.Meta(min_length=1)] | None = None


def settings_of(extra_config: Mapping[str, object]) -> Settings:
    """Return the settings. Raise ValueError, which names the key, if a setting is unknown or out of range."""
    try:
        settings = msgspec.convert(extra_config, Settings)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_connector_extra_config: {error}") from None
    return msgspec.structs.replace(settings, sidecar=settings.sidecar.removeprefix(SOCKET_SCHEME))
