"""Operators' verbs on a sidecar, over HTTP and with `kvtier operate`."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from layout_bed import CHUNK_TOKENS, LayoutBed, layout
from sidecars import TOKEN as HTTP_TOKEN
from sidecars import RunningSidecar, running_sidecar, small_config
from waiting import wait_for

from kvtier.cli.main import main
from kvtier.sidecar.endpoint import AttachedClient, Lease, LeaseUse
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.lower.purge import PurgeOrder
from kvtier.tiers.naming.events import EventLog
from kvtier.tiers.naming.tier import Tier
from kvtier.web.api_keys import ApiKeys
from kvtier.web.operating.audit_log import AuditLog
from kvtier.web.operating.operators import Operators
from kvtier.web.operating.routes import Operating

TOKEN = "op-token-3333"
NONE = {"blocks": 0, "bytes": 0, "leased": 0}


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_OPERATOR_TOKEN", TOKEN)


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def sidecar(tmp_path: Path, audit: Path) -> Iterator[RunningSidecar]:
    """Host memory and disk; HTTP has a token, and operators have one of their own."""
    config = small_config(tmp_path / "store", http={"port": 0, "token": HTTP_TOKEN})
    with (
        closing(Operating(Operators(ApiKeys({TOKEN: "olga"})), AuditLog(str(audit)))) as operating,
        running_sidecar(config, operating=operating) as running,
    ):
        wait_for(lambda: stats(running)["store"]["not_open"] is None)
        yield running


def test_a_reset_and_a_clear_say_that_what_machines_share_stays(tmp_path: Path, audit: Path) -> None:
    url = f"file://{tmp_path}/objects"
    with (
        closing(Operating(Operators(ApiKeys({TOKEN: "olga"})), AuditLog(str(audit)))) as operating,
        running_sidecar(small_config(remote={"url": url}), operating=operating) as running,
    ):
        reset = operate(running, "reset", {"all": True}).json()
        cleared = running.post("/v1/kvtier/clear").json()
    with running_sidecar(small_config()) as running:
        alone = running.post("/v1/kvtier/clear").json()

    assert reset["note"] == cleared["note"]
    assert f"blocks in {url} stay and are found again" in cleared["note"]
    assert "note" not in alone


def stats(running: RunningSidecar) -> dict:
    return running.get("/v1/kvtier/stats", headers={"Authorization": f"Bearer {HTTP_TOKEN}"}).json()


def operate(running: RunningSidecar, verb: str, asked: object = None, token: str = TOKEN) -> httpx.Response:
    return running.post(f"/v1/kvtier/operate/{verb}", json=asked or {}, headers={"Authorization": f"Bearer {token}"})


def done(running: RunningSidecar, verb: str, **asked: object) -> dict:
    answer = operate(running, verb, asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def num_found(running: RunningSidecar, document: int, num_chunks: int, model: str = "m") -> int:
    def find() -> int:
        tiers = running.sidecar.layouts.open(layout(model))
        chain = LayoutBed.chain(None, tiers, document, num_chunks)  # type: ignore[arg-type]
        return len(tiers.tiers.find_run(0, chain.names))

    return running.ask(find)


def test_a_model_leaves_host_and_disk_and_another_stays(sidecar: RunningSidecar) -> None:
    one = sidecar.store(1, 6)
    sidecar.store(2, 4, "other")
    done(sidecar, "spill")

    tiers = done(sidecar, "reset", namespace=one.digest.hex()[:12])["tiers"]

    assert tiers["host"]["blocks"] == tiers["disk"]["blocks"] == 6
    assert (num_found(sidecar, 1, 6), num_found(sidecar, 2, 4, "other")) == (0, 4)


def test_a_tenant_leaves_and_then_everything(sidecar: RunningSidecar) -> None:
    sidecar.store(1, 6, salt="ann")
    sidecar.store(1, 4)
    sidecar.store(2, 3, "other", salt="ann")
    done(sidecar, "spill")

    of_ann, of_all = (done(sidecar, "reset", **asked)["tiers"] for asked in ({"tenant": "ann"}, {"all": True}))

    assert (of_ann["host"]["blocks"], of_ann["disk"]["blocks"]) == (9, 9)
    assert (of_all["host"]["blocks"], of_all["disk"]["blocks"]) == (4, 4)
    wait_for(lambda: num_found(sidecar, 1, 4) == 0)
    sidecar.ask(sidecar.sidecar.layouts.check)


def test_what_is_on_disk_leaves_also_before_any_engine_has_attached(sidecar: RunningSidecar, tmp_path: Path) -> None:
    sidecar.store(1, 6)
    done(sidecar, "spill")
    assert done(sidecar, "reset", all=True)["tiers"]["disk"]["blocks"] == 6

    assert done(sidecar, "reset", all=True)["tiers"] == {"host": NONE, "disk": NONE}


def test_the_oldest_of_a_tier_leave(sidecar: RunningSidecar) -> None:
    for document in (1, 2):  # one after the other: two threads write
        sidecar.store(document, 6)
        done(sidecar, "spill")

    assert done(sidecar, "evict", tier="disk", blocks=6)["tiers"]["disk"]["blocks"] == 6
    assert done(sidecar, "evict", tier="host", blocks=4)["tiers"]["host"]["blocks"] == 4
    assert operate(sidecar, "evict", {"tier": "device", "blocks": 1}).status_code == 409
    wait_for(lambda: num_found(sidecar, 1, 6) < 6)
    assert num_found(sidecar, 2, 6) == 6


def test_a_pinned_prompt_stays_until_it_is_unpinned(sidecar: RunningSidecar) -> None:
    sidecar.store(1, 6)
    token_ids = [1000 + i for i in range(6 * CHUNK_TOKENS)]

    pin = done(sidecar, "pin", model="m", token_ids=token_ids, seconds=600)

    assert (pin["num_chunks"], pin["num_tokens"]) == (6, len(token_ids))
    assert done(sidecar, "reset", all=True)["tiers"]["host"] == {**NONE, "leased": 6}
    assert num_found(sidecar, 1, 6) == 6
    done(sidecar, "unpin", pin=pin["pin"])
    assert done(sidecar, "reset", all=True)["tiers"]["host"]["blocks"] == 6


def test_check_is_refused_while_engines_load_unless_it_is_wanted_now(sidecar: RunningSidecar) -> None:
    sidecar.store(1, 6)
    assert done(sidecar, "check")["verified"][-1] == "endpoints and pins"

    lease = Lease(LeaseUse.PROMISED, 0, 3, 0.0)
    sidecar.endpoint.attached = [AttachedClient("instance 7", 0.0, layout(), (lease,))]
    assert operate(sidecar, "check").status_code == 409
    assert len(done(sidecar, "check", now=True)["verified"]) == 2
    sidecar.endpoint.damage = "an endpoint's books do not agree"
    assert operate(sidecar, "check", {"now": True}).status_code == 500
    sidecar.endpoint.damage = ""


def test_operators_and_those_who_may_read_have_tokens_of_their_own(sidecar: RunningSidecar, audit: Path) -> None:
    assert operate(sidecar, "reset", {"all": True}, token=HTTP_TOKEN).status_code == 401
    assert sidecar.get("/v1/kvtier/stats", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 401
    assert operate(sidecar, "log-level", {"level": "info", "logger": "kvtier.nothing"}).status_code == 200

    told = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line["who"], line["verb"], line["outcome"]["status"]) for line in told] == [
        (None, "", 401),
        ("olga", "log-level", 200),
    ]
    metrics = sidecar.get("/metrics", headers={"Authorization": f"Bearer {HTTP_TOKEN}"}).text
    assert 'kvtier_http_requests_total{route="/v1/kvtier/operate",status="401"} 1.0' in metrics


def test_without_operators_there_are_no_such_routes() -> None:
    with running_sidecar(small_config()) as running:
        assert operate(running, "reset", {"all": True}).status_code == 404


def test_the_command_does_the_same(sidecar: RunningSidecar, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sidecar.store(1, 6)
    (tmp_path / "ids.json").write_text(json.dumps([1000 + i for i in range(6 * CHUNK_TOKENS)]))
    to = ["--url", sidecar.url]

    assert main(["operate", "spill", *to]) == 0
    pin = ["operate", "pin", "--token-ids", str(tmp_path / "ids.json"), "--model", "m", "--seconds", "1h"]
    assert main([*pin, *to]) == 0
    assert main(["operate", "reset", "--all", *to]) == 0
    out = capsys.readouterr().out
    assert "num_chunks: 6" in out
    assert "6 leased or pinned stay" in out
    (tmp_path / "ids.json").write_text("[1, 2.5]")
    assert main([*pin, *to]) == 2
    assert "not a JSON array of integers" in capsys.readouterr().err


def test_engines_at_the_own_endpoint_are_told_what_has_left(tmp_path: Path) -> None:
    bed, events = LayoutBed(Path("/dev/shm"), num_extents=8, store=MemoryStore(4 << 20)), EventLog()
    tiers = bed.layouts.open(layout(), events)
    bed.put(tiers, 1, 6)
    bed.put(bed.layouts.open(replace(layout(), model="other")), 2, 6)
    events.take()
    purge = bed.layouts.purge(PurgeOrder(frozenset({Tier.HOST, Tier.DISK})))

    while not purge.go_on():
        bed.settle()
    bed.settle()

    gone = {(event.tier, name) for event in events.take() for name in event.names}
    names = bed.chain(tiers, 1, 6).names
    assert gone == {(tier, name) for tier in (Tier.HOST, Tier.DISK) for name in names}
    assert purge.outcome()[Tier.HOST].num_blocks == purge.outcome()[Tier.DISK].num_blocks == 12
    bed.layouts.check()
    bed.close()


def test_each_layout_loses_a_part_as_it_has_of_host_memory() -> None:
    bed = LayoutBed(Path("/dev/shm"), num_extents=8, store=MemoryStore(4 << 20))
    one, other = bed.layouts.open(layout()), bed.layouts.open(replace(layout(), model="other"))
    bed.put(one, 1, 40)  # of 16 an extent: three
    bed.put(other, 2, 10)  # one

    purge = bed.layouts.purge(PurgeOrder(frozenset({Tier.HOST}), max_blocks=8))
    while not purge.go_on():
        bed.settle()

    assert [tiers.tiers.index.host[0].pool.num_named for tiers in (one, other)] == [40 - 6, 10 - 2]
    bed.close()
