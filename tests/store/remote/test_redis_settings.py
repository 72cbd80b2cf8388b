"""What URLs of Valkey and Redis servers say, and what they do not give away."""

import pytest

from kvtier.store.remote.redis_settings import Address, RedisSettings, RedisTls

SECRET = "p@ss:w/rd"


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("redis://cache", RedisSettings((Address("cache", 6379),))),
        ("valkey://cache:1234/3", RedisSettings((Address("cache", 1234),), db=3)),
        ("redis://10.0.0.1:7000/", RedisSettings((Address("10.0.0.1", 7000),))),
        ("redis://[::1]:7000", RedisSettings((Address("::1", 7000),))),
        ("redis://[fd00::2]", RedisSettings((Address("fd00::2", 6379),))),
        ("redis://:word@cache", RedisSettings((Address("cache", 6379),), password="word")),
        ("redis://me:p%40ss%3Aw%2Frd@cache", RedisSettings((Address("cache", 6379),), username="me", password=SECRET)),
        ("rediss://cache", RedisSettings((Address("cache", 6379),), tls=RedisTls())),
        ("valkeys://cache", RedisSettings((Address("cache", 6379),), tls=RedisTls())),
        ("redis+cluster://a:1,b:2,c", RedisSettings((Address("a", 1), Address("b", 2), Address("c", 6379)), True)),
        ("valkey+cluster://u:w@a:1", RedisSettings((Address("a", 1),), True, username="u", password="w")),
        ("rediss+cluster://a", RedisSettings((Address("a", 6379),), True, tls=RedisTls())),
    ],
)
def test_a_url_says_all_that_is_needed(url: str, settings: RedisSettings) -> None:
    assert RedisSettings.from_url(url) == settings


def test_a_password_and_certificates_may_come_from_elsewhere() -> None:
    settings = RedisSettings.from_url("rediss://me@cache", SECRET, RedisTls("ca.pem", "me.pem", "me.key"))

    assert settings.password == SECRET
    assert settings.tls == RedisTls("ca.pem", "me.pem", "me.key")


@pytest.mark.parametrize(
    "url",
    [
        f"http://me:{SECRET}@cache",
        f"redis+sentinel://me:{SECRET}@cache",
        f"redis://me:{SECRET}@cache:port",
        f"redis://me:{SECRET}@cache:99999",
        f"redis://me:{SECRET}@cache/keys",
        f"redis://me:{SECRET}@",
        f"redis://me:{SECRET}@a,b",
        f"redis+cluster://me:{SECRET}@a,b/3",
        f"me:{SECRET}@cache",
    ],
)
def test_a_url_that_is_none_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ValueError, match="redis: ") as refused:
        RedisSettings.from_url(url)

    assert "w/rd" not in str(refused.value)
    assert "w/rd" not in repr(refused.getrepr(chain=True, style="value"))


def test_certificates_without_tls_are_refused() -> None:
    with pytest.raises(ValueError, match="rediss://"):
        RedisSettings.from_url("redis://cache", tls=RedisTls("ca.pem"))


@pytest.mark.parametrize("prefix", ["{tag}", "a}"])
def test_a_prefix_that_puts_all_records_on_one_node_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="brace"):
        RedisSettings((Address("a", 1),), prefix=prefix)


@pytest.mark.parametrize("wrong", [{"timeout_s": 0}, {"ttl_s": 0}, {"num_connections": 0}, {"addresses": ()}])
def test_settings_of_no_use_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="redis: "):
        RedisSettings(**{"addresses": (Address("a", 1),), **wrong})  # type: ignore[arg-type]


def test_where_it_is_and_how_it_looks_show_no_password() -> None:
    settings = RedisSettings.from_url("rediss+cluster://me:word@a:1,[::1]:2")

    assert settings.where == "rediss+cluster://a:1,[::1]:2"
    assert "word" not in repr(settings)
