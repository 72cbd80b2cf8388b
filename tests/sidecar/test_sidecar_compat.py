"""The names of LMCache, told of a sidecar."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sidecars import RunningSidecar, running_sidecar, small_config
from waiting import wait_for

from kvtier.engine.config import ConfigError
from kvtier.engine.observability.metrics.compat.lmcache_names import LMCACHE_CATALOGUE
from kvtier.sidecar.config import sidecar_config
from kvtier.sidecar.endpoint import ConnectorCounts
from kvtier.tiers.lower.statistics import TokenBalance


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningSidecar]:
    with running_sidecar(small_config(tmp_path / "store", metrics={"compat": ["lmcache"]})) as running:
        wait_for(lambda: running.get("/v1/kvtier/stats").json()["store"]["not_open"] is None)
        yield running


def told(running: RunningSidecar) -> dict[str, float]:
    """The samples of LMCache's names, without their labels: here each has one value of each."""
    return {
        sample.name.removeprefix("lmcache_mp_"): sample.value
        for family in text_string_to_metric_families(running.get("/metrics").text)
        for sample in family.samples
        if family.name.startswith("lmcache_mp_")
    }


def test_lookups_loads_and_stores_are_those_of_the_endpoints(running: RunningSidecar) -> None:
    tokens = TokenBalance(device=40, host=512, disk=256, recomputed=300)
    running.endpoint.counted = ConnectorCounts("open", num_loaded=3, num_stored=5, tokens=tokens)

    found = told(running)

    assert (found["lookup_requested_tokens_total"], found["lookup_hit_tokens_total"]) == (1068, 768)
    assert (found["lookup_prompt_tokens_total"], found["lookup_request_hit_tokens_total"]) == (1108, 808)
    assert (found["lookup_hit_l1_tokens_total"], found["lookup_hit_l2_tokens_total"]) == (512, 256)
    assert found["num_chunks_loaded_total"] == found["l1_read_chunks_total"] == 3
    assert found["l1_write_chunks_total"] == 5


def test_what_is_spilled_is_read_from_host_memory_and_stored_on_disk(running: RunningSidecar) -> None:
    running.store(document=1, num_chunks=4)
    running.post("/v1/kvtier/spill")

    found = told(running)

    assert found["l2_store_completed_objects_chunks_total"] == found["l1_read_chunks_total"] == 4
    assert found["l2_usage_bytes"] > 0
    assert found["l1_memory_usage_bytes"] == running.get("/v1/kvtier/stats").json()["tiers"]["host"]["num_bytes"] > 0
    assert 0 < found["l1_usage_ratio"] < 1


def test_a_sidecar_tells_only_what_the_catalogue_has_and_no_model_that_a_client_could_choose(
    running: RunningSidecar,
) -> None:
    families = list(text_string_to_metric_families(running.get("/metrics").text))

    found = {(each.name, each.type, each.documentation) for each in families if each.name.startswith("lmcache")}
    models = {sample.labels.get("model_name", "") for each in families for sample in each.samples}

    assert found <= {(each.name, each.kind.value, each.help) for each in LMCACHE_CATALOGUE}
    assert {each.name for each in LMCACHE_CATALOGUE} - {name for name, _, _ in found} == {
        "lmcache_mp_active_prefetch_jobs",
        "lmcache_mp_l0_block_idle_before_evict_seconds",
        *(f"lmcache_mp_num_{state}_{what}" for state in ("submitted", "finished") for what in ("stores", "retrieves")),
        "lmcache_mp_transfer_phase_bytes",
        "lmcache_mp_transfer_phase_elapsed_seconds",
    }
    assert models == {""}


def test_vllms_names_are_refused_since_the_engines_tell_them() -> None:
    with pytest.raises(ConfigError, match="the engines export vLLM's metrics themselves"):
        sidecar_config(None, {"metrics": {"compat": ["vllm"]}})
