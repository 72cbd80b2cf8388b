"""Reading where an object store is."""

import pytest

from kvtier.store.remote.object_settings import ObjectSettings, read_object_settings


def test_options_may_be_text_or_values() -> None:
    read = read_object_settings(
        "s3://bucket/a/b",
        {"endpoint": "http://127.0.0.1:9000", "allow_http": "true", "timeout_s": "2.5", "num_connections": 8},
    )

    assert read == ObjectSettings(
        "s3://bucket/a/b", "http://127.0.0.1:9000", allow_http=True, timeout_s=2.5, num_connections=8
    )
    assert read.scheme == "s3"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"time_out": 3}, "unknown option time_out"),
        ({"timeout_s": "soon"}, "timeout_s"),
        ({"allow_http": "perhaps"}, "allow_http"),
        ({"timeout_s": None}, "timeout_s"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"num_connections": 0}, "num_connections"),
    ],
)
def test_an_option_that_cannot_be_meant_is_named(options: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_object_settings("s3://bucket", options)


@pytest.mark.parametrize("url", ["bucket/prefix", "http://host/bucket", "redis://host", "s3:///prefix", ""])
def test_a_url_that_is_none_of_the_kinds_is_refused_with_those_that_are(url: str) -> None:
    with pytest.raises(ValueError, match="give s3://bucket/prefix"):
        ObjectSettings(url)


@pytest.mark.parametrize(
    "url",
    ["s3://AKID:hidden@bucket/prefix", "az://container/p?sig=hidden", "s3://bucket/p#hidden", "http://x:hidden@b/"],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="object store") as raised:
        ObjectSettings(url)

    assert "hidden" not in str(raised.value)
