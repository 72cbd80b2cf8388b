"""`ObjectSettings`: the location of an object store, and the options and timeout for its requests."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

_SCHEMES = ("s3", "gs", "az", "file")


@dataclass(frozen=True, slots=True)
class ObjectSettings:
    """The location of an object store (its URL) and the options for reaching it.

    The URL is `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or `file:///folder`. Credentials come
    from the environment variables that each cloud's own tools also read (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,
    GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY), or from the machine's
    role. The URL must not contain credentials. Raises ValueError for invalid settings.
    """

    url: str
    endpoint: str = ""  # of a server other than the cloud's own, such as http://127.0.0.1:9000
    region: str = ""
    allow_http: bool = False
    timeout_s: float = 10.0  # of one request with its data; a call takes at most three times as long
    num_connections: int = 16

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in _SCHEMES or not (parts.netloc or parts.scheme == "file"):
            raise ValueError(
                f"object store: cannot read the URL {_without_secrets(self.url)}; "
                "give s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///folder"
            )
        if parts.query or parts.fragment or "@" in parts.netloc:
            raise ValueError(
                f"object store: {_without_secrets(self.url)} has a user, a password or parameters; "
                "put credentials in the environment"
            )
        if not 0 < self.timeout_s <= 300 or not 0 < self.num_connections <= 256:
            raise ValueError("object store: timeout_s must be above 0 and at most 300, num_connections 1 to 256")

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme


def read_object_settings(url: str, options: Mapping[str, object]) -> ObjectSettings:
    """Return the settings for *url*. *options* maps names of `ObjectSettings` fields to values, or to text to parse.

    Raises ValueError for an unknown option or a value of the wrong type. The message contains the option's name.
    """
    kinds = {field.name: type(field.default) for field in fields(ObjectSettings) if field.name != "url"}
    unknown = sorted(set(options) - set(kinds))
    if unknown:
        raise ValueError(f"object store: unknown option {unknown[0]}; use {', '.join(kinds)}")
    return ObjectSettings(url, **{name: _value(name, options[name], kinds[name]) for name in options})  # type: ignore[arg-type]


def _value(name: str, given: object, kind: type) -> object:
    if kind is bool:
        known = {"true": True, "false": False, "1": True, "0": False}
        value = known.get(str(given).lower())
    else:
        try:
            value = kind(given)
        except (TypeError, ValueError):
            value = None
    if value is None:
        raise ValueError(f"object store: {name} = {given!r} is not of type {kind.__name__}")
    return value


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
