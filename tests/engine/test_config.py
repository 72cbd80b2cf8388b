"""Configuration: TOML and dicts become one checked tree, and every mistake names its path."""

from pathlib import Path

import msgspec
import pytest

from kvtier.engine.config import (
    ByteSize,
    Config,
    ConfigError,
    DeviceConfig,
    DiskConfig,
    EventsConfig,
    HostConfig,
    as_config,
    config_from_dict,
    load_config,
    parse_bytes,
)
from kvtier.tiers.naming.block_hash import HashAlgorithm

SHIPPED = sorted(path.stem for path in (Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("0", 0),
        ("512", 512),
        ("7B", 7),
        ("64KB", 64_000),
        ("64KiB", 65_536),
        ("512MiB", 2**29),
        (" 8 GiB ", 2**33),
        ("8gb", 8 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("2TiB", 2**41),
    ],
)
def test_a_size_is_read_in_bytes(size, num_bytes):
    assert parse_bytes(size) == num_bytes
    assert isinstance(parse_bytes(size), ByteSize)


@pytest.mark.parametrize("size", ["", "GiB", "8 gigs", "8G", "-1", "1e9", "8GiB8", "٨GiB", -1, 1.5, True, None])
def test_a_bad_size_is_refused(size):
    with pytest.raises(ValueError, match="bad size"):
        parse_bytes(size)


def test_an_empty_file_is_the_default_configuration(tmp_path):
    (tmp_path / "empty.toml").write_text("")

    config = load_config(tmp_path / "empty.toml")

    assert config == Config()
    assert config.host == HostConfig(capacity=parse_bytes("4GiB"))
    assert config.disk is None


def test_a_file_sets_what_it_names_and_leaves_the_rest(tmp_path):
    (tmp_path / "some.toml").write_text('metrics_port = 9400\n[device]\nblock_size = 64\n[disk]\npath = "~/kv"\n')

    config = load_config(str(tmp_path / "some.toml"))

    assert config.metrics_port == 9400
    assert config.device == DeviceConfig(block_size=64)
    assert config.disk is not None
    assert config.disk.path == str(Path.home() / "kv")


@pytest.mark.parametrize(
    ("names", "seed"),
    [
        ({}, "kvtier"),
        ({"algorithm": "sha256_cbor"}, "vllm-none-hash"),
        ({"algorithm": "sha256_cbor", "seed": "42"}, "42"),
        ({"seed": ""}, ""),
    ],
)
def test_names_without_a_seed_have_their_algorithm_s(names, seed):
    assert as_config({"names": names}).names.resolved_seed == seed


@pytest.mark.parametrize(
    "tables",
    [{"names": {"seed": "\ud800"}}, {"tenants": {"\ud800": {}}}, {"lora": {"\ud800": {"path": "folder"}}}],
    ids=["seed", "salt", "adapter"],
)
def test_text_of_names_that_is_no_unicode_is_an_error_with_its_table(tables):
    with pytest.raises(ConfigError, match=rf"{next(iter(tables))}.*not valid Unicode"):
        as_config(tables)


def test_every_hash_algorithm_can_be_chosen():
    for algorithm in HashAlgorithm:
        assert as_config({"names": {"algorithm": str(algorithm)}}).names.algorithm == algorithm


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_configuration_loads_by_its_name(name):
    config = load_config(name)

    assert config != Config()
    assert config == as_config(config)


def test_an_unknown_name_lists_the_shipped_ones():
    with pytest.raises(ConfigError, match=rf"lptop: no such file.*; use one of {', '.join(SHIPPED)}$"):
        load_config("lptop")


def test_a_file_that_is_not_toml_is_named(tmp_path):
    (tmp_path / "bad.toml").write_text("[device\n")

    with pytest.raises(ConfigError, match=r"bad\.toml: .*line 1"):
        load_config(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"host": {"capacty_bytes": 1}}, "$.host.capacty_bytes: unknown key; did you mean capacity?"),
        ({"hots": {}}, "$.hots: unknown key; did you mean host?"),
        ({"device": {"metrics_port": 1}}, "$.device.metrics_port: unknown key; did you mean $.metrics_port?"),
        ({"host": {"zzz": 1}}, "$.host.zzz: unknown key"),
        ({"host": [{}]}, "$.host: must be a table, not a list"),
        ({"device": {"capacity": 2**64}}, "$.device.capacity: size 18446744073709551616 is too large"),
        (
            {"scheduler": {"token_budget": 2**64}},
            "$.scheduler.token_budget: must be a whole number, 2147483648 or less",
        ),
        ({"server": {"max_header": 0}}, "$.server: max_header 0: too small for any request; use 1024 or more"),
        ({"server": {"max_body": 100}}, "$.server: max_body 100: too small for any request; use 1024 or more"),
        ({"host": {"capacity": "8 gigs"}}, "$.host.capacity: bad size '8 gigs'; write bytes as"),
        ({"device": {"block_size": "32"}}, "$.device.block_size: must be a whole number, not a text"),
        ({"device": {"block_size": 0}}, "$.device.block_size: must be a whole number, 1 or more"),
        ({"device": {"capacity": 0}}, "$.device: capacity 0 holds no block"),
        ({"model": {"dtype": "int8"}}, "$.model.dtype: Invalid enum value 'int8'; use one of auto, float32,"),
        ({"disk": {}}, "$.disk.path: is missing; add this key"),
        ({"disk": {"path": ""}}, "$.disk.path: must not be empty"),
        ({"device": {"gpu_memory_utilization": 0}}, "$.device.gpu_memory_utilization: must be a number, more than 0"),
        ({"disk": {"path": "x", "codec": "gzip"}}, "$.disk.codec: Invalid enum value 'gzip'; use one of none, zstd"),
        (
            {"disk": {"path": "x", "read_timeout_s": float("inf")}},
            "$.disk.read_timeout_s: must be a number, 3600 or less",
        ),
        ({"scheduler": {"max_running": True}}, "$.scheduler.max_running: must be a whole number, not true or false"),
        ({"events": {"buffer": 5}}, "$.events.buffer: unknown key"),
        ({"events": {"replay": "tcp://*:0"}}, "$.events.replay: unknown key"),
        ({"events": {"enabled": True}}, "$.events.enabled: unknown key"),
        ({"events": {"int_block_hash": True}}, "$.events.int_block_hash: unknown key; did you mean int_block_hashes?"),
        (
            {"events": {"endpoint": "localhost:5557"}},
            "$.events.endpoint: not a valid address; write it as tcp://127.0.0.1:5557 or ipc:///run/kvtier-events.sock",
        ),
        (
            {"events": {"replay_endpoint": "udp://*:0"}},
            "$.events.replay_endpoint: not a valid address; write it as tcp://127.0.0.1:5557 or ipc:///",
        ),
        (
            {"tracing": {"endpoint": "localhost:4318"}},
            "$.tracing.endpoint: not a valid address; write it as http://127.0.0.1:4318",
        ),
        ({"events": {"endpoint": "tcp://*:99999"}}, "$.events: endpoint tcp://*:99999 has no valid port"),
        ({"events": {"hwm": 0}}, "$.events.hwm: must be a whole number, 1 or more"),
        ({"events": {"buffer_steps": 0}}, "$.events.buffer_steps: must be a whole number, 1 or more"),
        ({"metrics_port": 70_000}, "$.metrics_port: must be a whole number, 65535 or less"),
        ({"host": {"capacity": "0"}, "disk": {"path": "x"}}, "$: [disk] needs [host], because blocks are read"),
        ({"sidecar": "/run/kvtier.sock"}, "$: sidecar '/run/kvtier.sock': write it as unix:///run/kvtier.sock"),
        ({"sidecar": "unix://kvtier.sock"}, "$: sidecar 'unix://kvtier.sock': write it as unix:///run/kvtier.sock"),
        ({"sidecar": "tcp://127.0.0.1:5555"}, "$: sidecar 'tcp://127.0.0.1:5555': write it as unix:///run/kvtier.sock"),
        ({"sidecar": "unix:///run\0/x"}, "$: sidecar 'unix:///run\\x00/x': write it as unix:///run/kvtier.sock"),
        ({"sidecar": "unix:///" + 107 * "x"}, f"$: sidecar: /{107 * 'x'} is longer than the 107 bytes of a socket's"),
        ({"sidecar": "unix:///s", "host": {}}, "$: sidecar: the sidecar provides the host memory; remove [host]"),
        (
            {"sidecar": "unix:///s", "host": {"capacity": 0}, "disk": {"path": "x"}},
            "$: sidecar: the sidecar provides the disk; remove [disk], or remove the key sidecar to use",
        ),
        (
            {"sidecar": "unix:///s", "tenants": {"secret": {"host": 1}}},
            "$: tenants.....host: this tier belongs to the sidecar; give the quota in its configuration",
        ),
        (
            {"sidecar": "unix:///s", "tenants": {"secret": {"disk": 1, "name": "ann"}}},
            "$: tenants.ann.disk: this tier belongs to the sidecar; give the quota in its configuration",
        ),
        ({"tenants": {"": {"host": 1}}}, '$: tenants."": requests without a cache_salt belong to no tenant'),
        ({"tenants": {"a": {"name": "x"}, "b": {"name": "x"}}}, "$: tenants: duplicate name among x, x"),
    ],
)
def test_a_mistake_is_named_with_its_path(data, message):
    with pytest.raises(ConfigError) as raised:
        config_from_dict(data, "laptop.toml")

    assert str(raised.value).startswith(f"laptop.toml: {message}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("data", [{"host": {"capacity": "0"}}, {"host": None}])
def test_a_host_without_capacity_is_no_host_tier(data):
    assert config_from_dict(data).host is None


def test_with_a_sidecar_there_is_no_host_tier_of_one_s_own():
    config = config_from_dict({"sidecar": "unix:///run/kvtier.sock", "tenants": {"salt": {"name": "ann"}}})

    assert config.sidecar_path == "/run/kvtier.sock"
    assert (config.host, config.disk) == (None, None)
    assert as_config(config) == config


def test_a_sidecar_may_be_given_beside_a_host_of_no_capacity():
    config = config_from_dict({"sidecar": "unix:///run/kvtier.sock", "host": {"capacity": 0}})

    assert config.host is None


def test_a_host_of_the_default_size_is_refused_beside_a_sidecar_like_any_other():
    with pytest.raises(ValueError, match=r"remove \[host\]"):
        Config(sidecar="unix:///run/kvtier.sock", host=HostConfig())


def test_without_a_sidecar_there_is_no_path_of_one():
    assert Config().sidecar_path is None


def test_events_are_off_unless_there_is_a_table_for_them():
    assert Config().events is None
    assert config_from_dict({"events": {}}).events == EventsConfig()


def test_events_stay_on_this_machine_unless_the_configuration_says_more():
    events = EventsConfig()

    assert (events.endpoint, events.host, events.replay_endpoint) == ("tcp://*:5557", "127.0.0.1", None)


def test_a_changed_configuration_is_checked_again():
    config = msgspec.structs.replace(Config(), device=DeviceConfig(block_size=5000))

    with pytest.raises(ConfigError, match=r"\$\.device\.block_size"):
        as_config(config)


def test_as_config_takes_a_tree_a_dict_a_path_or_a_name(tmp_path):
    (tmp_path / "disk.toml").write_text('[disk]\npath = "kv"\ncapacity = "2GiB"\n')
    config = Config(disk=DiskConfig(path="kv", capacity=parse_bytes("2GiB")))

    assert as_config(config) == config
    assert as_config({"disk": {"path": "kv", "capacity": 2**31}}) == config
    assert as_config(tmp_path / "disk.toml") == config
    assert as_config("laptop") == load_config("laptop")
