"""The board and the alerts that ship with kvtier, over a real Prometheus that scrapes all that kvtier can be."""

import json
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from foreign.running import Sidecar
from grafana import Grafana, all_panels, open_panels
from prometheus_server import Prometheus, Target, prometheus
from raw_engine import CHUNK, Engine
from serving import BLOCK_BYTES, BLOCK_SIZE, ServerInThread, serving, tables
from transformers import PreTrainedModel
from under_load import store_and_load, under_load
from waiting import wait_for

from kvtier.engine.core import EngineCore

pytestmark = pytest.mark.long

CONFIGS = Path(__file__).parents[4] / "configs"
BOARD = json.loads((CONFIGS / "grafana" / "kvtier.json").read_text())
PANELS = all_panels(BOARD)
KEYS = {"sk-ann-1111": "ann", "sk-bob-2222": "bob", "sk-ops-3333": "ops"}
OPS = "sk-ops-3333"
DOCUMENTS, DOCUMENT_CHARACTERS = 14, 600  # more than device and host memory hold together
NUM_SLOTS = 100
NUM_SCRAPES = 60


def ask_around(server: ServerInThread, keys: list[str], number: int) -> None:
    """A question about one of some documents, so that tokens come from every tier, and blocks leave it."""
    rng = random.Random(number)
    document = random.Random(rng.randrange(DOCUMENTS)).choices("abcdefgh ", k=DOCUMENT_CHARACTERS)
    server.complete("".join(document) + str(number), rng.choice(keys), max_tokens=6)


def damage(core: EngineCore) -> None:
    """Flip a bit of some blocks that are in host memory, as bad memory does."""
    host = core.cache.lower.index.host
    assert host is not None, "an engine without host memory"
    memory = core.cache.residency.groups[0].memory
    for slot in range(0, NUM_SLOTS, 5):
        if host[0].pool.name(slot) is not None:
            memory.host_block(slot)[3] ^= 1


@dataclass(frozen=True)
class Scene:
    """What Prometheus scrapes, under load."""

    prometheus: Prometheus
    server: ServerInThread


@pytest.fixture(scope="module")
def scene(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A server with tenants and a disk, one with neither, and a sidecar with a foreign engine and one of kvtier's."""
    folder = tmp_path_factory.mktemp("scene")
    own = {
        **tables(NUM_SLOTS, metrics_tenants=["ops"]),
        "disk": {
            "path": str(folder / "store"),
            "capacity": "12MiB",
            "endurance": "1TB",
            "max_written_bytes_per_day": "100GB",
        },
        "request_log": {"path": str(folder / "requests.log")},
        "tenants": {"bob": {"host": 40 * BLOCK_BYTES, "disk": "4MiB"}},
    }
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    endpoint, file = folder / "own.sock", folder / "sidecar.toml"
    file.write_text('extent = "1MiB"\n')
    options = [
        "--config",
        str(file),
        "--host",
        "8MiB",
        "--disk",
        f"{folder / 'shared'}:64MiB",
        "--socket",
        str(endpoint),
    ]
    attached = {
        "device": {"capacity": NUM_SLOTS * BLOCK_BYTES, "block_size": BLOCK_SIZE},
        "sidecar": f"unix://{endpoint}",
        "metrics": {"compat": ["vllm", "lmcache"]},
    }
    with ExitStack() as stack:
        sidecar = stack.enter_context(
            Sidecar(f"ipc://{folder / 'endpoint.sock'}", *options, "--chunk-tokens", str(CHUNK), http_port=port)
        )
        server = stack.enter_context(serving(model, own, KEYS))
        plain = stack.enter_context(serving(model, tables(NUM_SLOTS)))
        second = stack.enter_context(serving(model, attached))
        engine = Engine(sidecar.endpoint)
        stack.callback(engine.close)
        stack.enter_context(under_load(lambda number: ask_around(server, ["sk-ann-1111", "sk-bob-2222"], number)))
        stack.enter_context(under_load(lambda number: ask_around(second, ["none"], number)))
        stack.enter_context(under_load(lambda number: ask_around(plain, ["none"], number)))
        stack.enter_context(under_load(lambda number: store_and_load(engine, number)))
        targets = {
            "kvtier": Target(server.port, OPS),
            "kvtier-attached": Target(second.port),
            "kvtier-plain": Target(plain.port),
            "kvtier-sidecar": Target(port),
        }
        yield Scene(stack.enter_context(prometheus(folder, targets, [CONFIGS / "prometheus" / "alerts.yml"])), server)


def firing(scene: Scene) -> set[str]:
    found = scene.prometheus.ask("alerts")
    return {each["labels"]["alertname"] for each in found["alerts"] if each["state"] == "firing"}  # type: ignore[index]


def test_every_query_of_the_board_returns_data_in_a_minute_of_scrapes(scene: Scene) -> None:
    grafana = Grafana(scene.prometheus, are_of="kvtier_prompt_tokens_total")

    grafana.shows_all(target["expr"] for panel in PANELS for target in panel["targets"])

    wait_for(lambda: min(scene.prometheus.num_scraped().values()) >= NUM_SCRAPES, pause_s=1.0)


def test_no_panel_that_is_open_at_first_is_empty_for_a_server_without_a_disk(scene: Scene) -> None:
    plain = Grafana(scene.prometheus, variables={"job": "kvtier-plain", "instance": ".*"})

    plain.shows_all(target["expr"] for panel in open_panels(BOARD) for target in panel["targets"])


def test_an_engine_on_a_sidecar_tells_the_names_of_others_too(scene: Scene) -> None:
    Grafana(scene.prometheus).shows_all(
        f'{name}{{job="kvtier-attached"}} > 0'
        for name in (
            "vllm:prompt_tokens_total",
            "vllm:inter_token_latency_seconds_count",
            "lmcache_mp_lookup_requested_tokens_total",
            "lmcache_mp_l1_memory_usage_bytes",
            "lmcache_mp_l2_usage_bytes",
        )
    )


def test_a_corrupt_block_is_shown_by_its_cause_and_its_alert_fires(scene: Scene) -> None:
    (panel,) = [panel for panel in PANELS if panel["title"] == "Corrupt blocks" and panel["type"] == "timeseries"]
    grafana = Grafana(scene.prometheus, are_of="kvtier_prompt_tokens_total")

    def shown() -> set[tuple[str, str]]:
        query = grafana.asked(panel["targets"][0]["expr"])
        found = scene.prometheus.ask("query", query=query)["result"]  # type: ignore[index]
        return {(each["metric"].get("tier"), each["metric"].get("cause")) for each in found}

    def is_told() -> bool:
        scene.server.ask(damage)
        return "KvtierCorruptBlocks" in firing(scene) and ("host", "corrupt") in shown()

    wait_for(is_told, pause_s=1.0)


def test_prometheus_evaluates_every_rule_and_none_of_trouble_that_there_is_not_fires(scene: Scene) -> None:
    groups = scene.prometheus.ask("rules")["groups"]  # type: ignore[index]

    assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
    assert firing(scene) <= {"KvtierCorruptBlocks"}
