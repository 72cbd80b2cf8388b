"""The page at `/dashboard` of a sidecar, and its data: what is told, and who may see it."""

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from layout_bed import layout
from plain_http import NO_TLS
from sidecars import TOKEN, RunningSidecar, running_sidecar, small_config
from waiting import DEADLINE_S, wait_for
from watching import watching

from kvtier.sidecar.endpoint import AttachedClient, ConnectorCounts
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.tier import Reason
from kvtier.web.paths import DATA_PATHS, STREAM


@pytest.fixture
def plain() -> Iterator[RunningSidecar]:
    with running_sidecar(small_config()) as running:
        yield running


def tick(running: RunningSidecar) -> tuple[dict[str, float], dict[str, Any]]:
    """The numbers by column, and the facts, of a tick that is told from now on."""
    with watching(running.url) as events:
        columns = next(content for name, content in events if name == "hello")["columns"]
        told = next(content for name, content in events if name == "tick")
    return dict(zip(columns, told["now"], strict=True)), told["facts"]


def test_a_tick_tells_the_numbers_of_stats(plain: RunningSidecar) -> None:
    plain.store(1, 6)
    tokens = TokenBalance(host=512, disk=0, recomputed=90, reasons={Reason.NEVER_SEEN: 90})
    plain.endpoint.counted = ConnectorCounts("open", num_asked=8, num_promised=6, lost={"late": 2}, tokens=tokens)

    now, facts = tick(plain)
    stats = plain.get("/v1/kvtier/stats").json()

    assert now["tier.host.bytes"] == stats["tiers"]["host"]["num_bytes"] > 0
    assert now["tier.host.blocks"] == 6
    assert (now["tokens.host"], now["tokens.recomputed"], now["reason.never_seen"]) == (512, 90, 90)
    assert (now["chunks.asked"], now["chunks.promised"], now["chunks.lost"]) == (8, 6, 2)
    for lane, moved in stats["lanes"].items():
        assert now[f"lane.{lane}.bytes"] == moved["num_bytes"]
    assert facts["layouts"][0]["chunks"] == 6
    assert facts["endpoints"][0]["why_lost"] == {"late": 2}


def test_the_page_is_told_the_host_the_memory_and_how_to_attach_an_engine(plain: RunningSidecar) -> None:
    with watching(plain.url) as events:
        about = next(content for name, content in events if name == "hello")
    now, _ = tick(plain)
    memory = plain.get("/v1/kvtier/stats").json()["memory"]

    assert about["host"] == socket.gethostname()
    assert "KVTierConnector" in about["attach"][0]["lines"][0]
    assert now["memory.resident"] == pytest.approx(memory["resident_bytes"], rel=0.5)
    assert now["memory.host_tier"] == now["backed.bytes"]


def test_engines_that_are_attached_are_shown(plain: RunningSidecar) -> None:
    plain.endpoint.attached = [AttachedClient("instance 7", plain.sidecar.now() - 60.0, layout())]

    now, facts = tick(plain)

    assert now["clients"] == 1
    assert [(client["name"], client["layout"]["model"]) for client in facts["clients"]] == [("instance 7", "m")]


def test_what_operators_keep_is_shown(plain: RunningSidecar) -> None:
    stored = plain.store(1, 6)
    token_ids = [1000 + number for number in range(6 * stored.chunk_tokens)]
    pinned = plain.post("/v1/kvtier/pin", json={"model": stored.model, "token_ids": token_ids, "seconds": 600}).json()

    now, facts = tick(plain)

    (shown,) = facts["pins"]["held"]
    assert (shown["name"], shown["model"], shown["chunks"]) == (f"pin {pinned['pin']}", stored.model, 6)
    assert now["pinned.bytes"] == facts["pins"]["bytes"] > 0


@pytest.mark.long
def test_an_owner_that_is_stuck_is_told_of_to_those_that_watch() -> None:
    with running_sidecar(small_config(), answer_s=0.05) as running:
        wait_for(lambda: running.get("/health").status_code == 200)
        with watching(running.url) as events:
            assert next(name for name, _ in events if name in ("tick", "silent"))
            let_go = running.hold()
            why = next(content for name, content in events if name == "silent")["why"]
            let_go()
            assert next(name for name, _ in events if name == "tick")

    assert "has not answered" in why


def test_with_a_token_the_page_is_there_for_all_and_the_numbers_are_not() -> None:
    with running_sidecar(small_config(http={"port": 0, "token": TOKEN})) as locked:
        root = locked.get("/")
        assert (root.status_code, root.headers["location"]) == (307, "dashboard")
        assert locked.get("/dashboard").status_code == 200
        assert locked.get("/dashboard/page/main.js").status_code == 200
        assert {locked.get(path).status_code for path in DATA_PATHS} == {401}
        with watching(locked.url, TOKEN) as events:
            assert next(events)[0] == "hello"


def test_without_a_token_another_pages_script_gets_no_number(plain: RunningSidecar) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}):
        for path in ["/dashboard/history", "/dashboard"]:
            assert plain.get(path, headers=headers).status_code == 403
    assert plain.get("/dashboard/history", headers={"Origin": plain.url}).status_code == 200


@pytest.mark.long
def test_the_history_is_kept_beside_the_store(tmp_path: Any) -> None:
    with running_sidecar(small_config(tmp_path / "store")) as running:
        tick(running)
    with running_sidecar(small_config(tmp_path / "store")) as running:
        wait_for(lambda: len(_known(running)) >= 2)

    assert (tmp_path / "store-history").stat().st_size < 2_500_000


def _known(running: RunningSidecar) -> list[float]:
    columns = running.get("/dashboard/history?range=600").json()["columns"]
    return [value for value in columns.get("tier.host.capacity", []) if value is not None]


def test_viewers_do_not_hold_up_the_end_of_a_sidecar() -> None:
    with running_sidecar(small_config()) as running:
        client = httpx.Client(timeout=DEADLINE_S, verify=NO_TLS)
        answer = client.send(client.build_request("GET", running.url + STREAM), stream=True)
        lines = answer.iter_lines()
        assert next(lines).startswith("event: hello")

    assert not [line for line in lines if line.startswith("event: ") and "tick" not in line and "own" not in line]
    client.close()
