"""Which vLLM its offloading on kvtier serves, and what decides a namespace: the shapes of vLLM, in one place."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.vllm_connector.engine_layout import UnsupportedEngine
from kvtier.connectors.vllm_offloading.known_vllm import (
    check_cpu_spec,
    check_tier,
    connector_configs,
    end_tokens,
    pool_facts,
)
from kvtier.connectors.vllm_offloading.open_tier import tier_settings


class Region:
    def __init__(self, engine_id: str, num_chunks: int, rank: int, kv_bytes_per_chunk: int, cpu_page_size: int) -> None:
        """As vLLM's class has it."""


class OlderRegion:
    def __init__(self, instance_id: str, num_blocks: int, rank: int, kv_bytes_per_block: int) -> None:
        """As it was before."""


class Tiers:
    def __init__(self, offloading_spec: Any, primary_kv_view: Any, tier_type: Any, backpressure_detector: Any) -> None:
        """As vLLM's class has it."""


class OlderTiers:
    def __init__(self, offloading_spec: Any, primary_kv_view: Any, tier_type: Any) -> None:
        """As it was before."""


def spec(**changes: Any) -> SimpleNamespace:
    known = {
        "num_chunks": 8,
        "kv_bytes_per_chunk": 4096,
        "cpu_page_size_per_worker": 4096,
        "replicated_layout": False,
        "blocks_per_chunk": 1,
        "config": SimpleNamespace(canonical_layout=False),
    }
    return SimpleNamespace(**(known | changes))


def vllm_config(**changes: Any) -> SimpleNamespace:
    cache = SimpleNamespace(prefix_caching_hash_algo="sha256")
    return SimpleNamespace(**({"cache_config": cache, "lora_config": None, "speculative_config": None} | changes))


def test_what_is_known_is_served() -> None:
    check_cpu_spec(spec(), Region, "cpu")
    check_tier(Tiers, vllm_config())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((spec(), Region, "cuda"), "without .spec_module_path"),
        ((spec(), OlderRegion, "cpu"), "has no engine_id, num_chunks, kv_bytes_per_chunk, cpu_page_size;"),
        ((SimpleNamespace(num_chunks=8), Region, "cpu"), "has no kv_bytes_per_chunk"),
        ((spec(config=SimpleNamespace(canonical_layout=True)), Region, "cpu"), "leave it out"),
        ((spec(num_chunks=0), Region, "cpu"), "raise it"),
    ],
    ids=["another platform", "another region", "another spec", "canonical layout", "no room"],
)
def test_a_vllm_without_what_copies_rest_on_is_refused_with_what_to_do(given: Any, says: str) -> None:
    with pytest.raises(UnsupportedEngine, match=says):
        check_cpu_spec(*given)


@pytest.mark.parametrize(
    ("base", "config", "says"),
    [
        (OlderTiers, vllm_config(), "have no backpressure_detector"),
        (Tiers, vllm_config(cache_config=SimpleNamespace(prefix_caching_hash_algo="xxhash")), "use sha256"),
        (Tiers, vllm_config(lora_config=object()), "use KVTierConnector"),
        (Tiers, vllm_config(speculative_config=object()), "speculative"),
    ],
    ids=["another interface", "hashes that can be made", "adapters", "drafts"],
)
def test_keys_that_do_not_stand_for_bytes_are_refused_with_what_to_do(base: type, config: Any, says: str) -> None:
    with pytest.raises(UnsupportedEngine, match=says):
        check_tier(base, config)


def test_the_configuration_is_that_of_the_connector_which_makes_the_tier() -> None:
    def tier() -> Any:
        return connector_configs()

    def spec_of(vllm_config: Any) -> Any:  # no KV cache's configuration here
        return tier()

    def connector(vllm_config: Any, kv_cache_config: Any) -> Any:
        return spec_of("of the specification")

    assert connector("of the connector", "its KV cache") == ("of the connector", "its KV cache")


def test_without_a_connector_that_knows_its_configuration_a_tier_is_refused() -> None:
    with pytest.raises(UnsupportedEngine, match=r"tested versions: 0\.32"):
        connector_configs()


@dataclass(frozen=True)
class Parallel:
    rank: int = 0
    world_size: int = 2
    data_parallel_index: int = 0


@dataclass(frozen=True)
class Offloading:
    engine_id: str = "a"
    groups: tuple[str, ...] = ("layers",)
    worker_kv_bytes_per_block: int = 4096
    replicated_layout: bool = False
    extra_config: dict[str, Any] = field(default_factory=dict)
    parallel: Parallel = Parallel()


@pytest.mark.parametrize(
    "other",
    [
        Offloading(groups=("layers", "others")),
        Offloading(worker_kv_bytes_per_block=8192),
        Offloading(replicated_layout=True),
        Offloading(parallel=Parallel(world_size=4)),
    ],
    ids=["groups", "bytes", "layout", "ranks"],
)
def test_pools_whose_rows_have_other_bytes_have_other_facts(other: Offloading) -> None:
    assert pool_facts(other) != pool_facts(Offloading())


def test_another_process_of_the_same_engine_has_the_same_facts() -> None:
    other = Offloading(engine_id="b", extra_config={"cpu_bytes_to_use": 1}, parallel=Parallel(data_parallel_index=1))

    assert pool_facts(other) == pool_facts(Offloading())
    assert pool_facts(replace(other, engine_id="c")) == pool_facts(Offloading())


def test_a_vllm_that_does_not_say_where_blocks_end_has_no_parents_and_no_error() -> None:
    assert end_tokens(SimpleNamespace()) == {}
    assert end_tokens(SimpleNamespace(_offload_key_positions={b"k": 16})) == {b"k": 16}


def test_settings_are_those_of_a_disk_and_a_mistake_is_named() -> None:
    settings = tier_settings({"path": "/tmp/store", "capacity": "8GiB", "weights": "revision 5"})

    assert (settings.capacity, settings.weights, settings.codec) == (8 << 30, "revision 5", "none")
    with pytest.raises(ValueError, match="capacty"):
        tier_settings({"path": "/tmp/store", "capacty": "8GiB"})
    with pytest.raises(ValueError, match="path"):
        tier_settings({"capacity": "8GiB"})
