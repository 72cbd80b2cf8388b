"""The boards of vLLM and LMCache over a real Prometheus that scrapes kvtier under load."""

import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from foreign.running import Sidecar
from grafana import Grafana
from peer_boards import BOARDS, Board
from prometheus_server import Prometheus, Target, prometheus
from raw_engine import CHUNK, Engine
from serving import ServerInThread, serving, tables
from transformers import PreTrainedModel
from under_load import store_and_load, under_load

pytestmark = pytest.mark.long

VLLM = "vllm:num_requests_running"
CHOSEN = {"ttft_slo": "1.0", "tpot_slo": "0.1"}  # as the board comes
DOCUMENTS, DOCUMENT_CHARACTERS = 14, 600  # more than device and host memory hold together
NUM_SLOTS = 100


def ask_around(server: ServerInThread, number: int) -> None:
    """A question about one of some documents, so that tokens come from every tier, and blocks leave it."""
    rng = random.Random(number)
    document = random.Random(rng.randrange(DOCUMENTS)).choices("abcdefgh ", k=DOCUMENT_CHARACTERS)
    server.complete("".join(document) + str(number), max_tokens=6)


def comes_to_be_shown(grafana: Grafana, board: Board, by: str) -> None:
    """Every query that is served returns data, sooner or later."""
    grafana.shows_all([query.expr for panel in board.panels for query in panel.served(by)])


@pytest.fixture(scope="module")
def scraped(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes an engine under load, which has told the names of both others."""
    folder = tmp_path_factory.mktemp("engine")
    config = {
        **tables(NUM_SLOTS),
        "disk": {"path": str(folder / "store"), "capacity": "12MiB"},
        "metrics": {"compat": ["vllm", "lmcache"]},
    }
    with (
        serving(model, config) as server,
        under_load(lambda number: ask_around(server, number)),
        prometheus(folder, {"kvtier": Target(server.port)}) as found,
    ):
        yield found


@pytest.mark.parametrize("name", BOARDS)
def test_panels_that_an_engine_serves_return_data(scraped: Prometheus, name: str) -> None:
    grafana = Grafana(scraped, VLLM, CHOSEN)

    comes_to_be_shown(grafana, BOARDS[name], "engine")


@pytest.mark.parametrize("name", BOARDS)
def test_panels_that_are_said_not_to_be_served_return_none(scraped: Prometheus, name: str) -> None:
    grafana = Grafana(scraped, VLLM, CHOSEN)
    asked = [query for panel in BOARDS[name].panels for query in panel.queries if query.not_served]
    in_promql = [query for query in asked if not query.expr.startswith("{ name =")]  # the others are for traces

    assert [query.expr for query in in_promql if grafana.is_shown(query.expr)] == []


def test_lmcaches_panels_return_data_of_a_sidecar_with_a_foreign_engine(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = tmp_path / "sidecar.toml"
    config.write_text('extent = "1MiB"\n[metrics]\ncompat = ["lmcache"]\n')
    options = ["--config", str(config), "--host", "1MiB", "--disk", f"{tmp_path / 'store'}:64MiB"]
    options += ["--chunk-tokens", str(CHUNK)]
    with Sidecar(f"ipc://{tmp_path / 'endpoint.sock'}", *options, http_port=port) as sidecar:
        engine = Engine(sidecar.endpoint)
        try:
            with (
                under_load(lambda number: store_and_load(engine, number)),
                prometheus(tmp_path, {"sidecar": Target(port)}) as found,
            ):
                comes_to_be_shown(Grafana(found), BOARDS["lmcache"], "sidecar")
        finally:
            engine.close()
