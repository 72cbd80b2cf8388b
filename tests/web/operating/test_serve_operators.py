"""Operators' verbs on `kvtier serve`, over HTTP and with `kvtier operate`."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import BLOCK_SIZE, Address, ServerInThread, come_true, serving, tables
from small_models import build

from kvtier.cli.main import main
from kvtier.web.api_keys import ApiKeys
from kvtier.web.operating.audit_log import AuditLog
from kvtier.web.operating.operators import Operators
from kvtier.web.operating.routes import Operating

ANN, BOB, TOKEN = "sk-ann-1111", "sk-bob-2222", "op-token-3333"
PROMPT = "Where were you last night? " * 12
NUM_BLOCKS = (len(PROMPT) - 1) // BLOCK_SIZE
ALL_FOUND = NUM_BLOCKS * BLOCK_SIZE


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@contextmanager
def operated(folder: Path, audit: Path, **more: object) -> Iterator[ServerInThread]:
    """Device, host and disk, and *more* tables; two tenants, one operator."""
    config = {**tables(), "disk": {"path": str(folder / "store"), "capacity": "64MiB"}, **more}
    with (
        closing(Operating(Operators(ApiKeys({TOKEN: "olga"})), AuditLog(str(audit)))) as operating,
        serving(build("llama"), config, {ANN: "ann", BOB: "bob"}, operating=operating) as address,
    ):
        yield address


@pytest.fixture
def server(tmp_path: Path, audit: Path) -> Iterator[ServerInThread]:
    with operated(tmp_path, audit) as address:
        yield address


@pytest.fixture(scope="module")
def idle_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerInThread]:
    """For tests that change nothing."""
    folder = tmp_path_factory.mktemp("idle")
    with operated(folder, folder / "audit.jsonl") as address:
        yield address


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_OPERATOR_TOKEN", TOKEN)


def operate(server: Address, verb: str, asked: object = None, token: str = TOKEN) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return server.post(f"/v1/kvtier/operate/{verb}", json=asked or {}, headers=headers)


def done(server: Address, verb: str, **asked: object) -> dict:
    answer = operate(server, verb, asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def num_cached(server: Address, key: str) -> int:
    """Tokens of the prompt that need not be computed; asking makes them cached again."""
    usage = server.complete(PROMPT, key, max_tokens=1)["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"] // BLOCK_SIZE * BLOCK_SIZE


def lines(audit: Path) -> list[dict]:
    return [json.loads(line) for line in audit.read_text().splitlines()]


def test_a_tenants_blocks_leave_device_host_and_disk_and_another_tenants_stay(server: ServerInThread) -> None:
    for key in (ANN, BOB):
        server.complete(PROMPT, key, max_tokens=1)
    done(server, "spill")

    tiers = done(server, "reset", tenant="ann")["tiers"]

    assert tiers["host"] == {"blocks": NUM_BLOCKS, "bytes": NUM_BLOCKS * BLOCK_SIZE * 1024, "leased": 0}
    assert tiers["device"]["blocks"] >= NUM_BLOCKS
    assert tiers["disk"]["blocks"] == NUM_BLOCKS
    assert num_cached(server, ANN) == 0
    assert num_cached(server, BOB) == ALL_FOUND
    server.ask(lambda core: core.check())


def test_everything_leaves_also_of_the_own_namespace(server: ServerInThread) -> None:
    server.complete(PROMPT, ANN, max_tokens=1)
    done(server, "spill")
    namespace = server.ask(lambda core: core.namespace.hex())

    assert done(server, "reset", namespace="00ff")["tiers"] == {"disk": {"blocks": 0, "bytes": 0, "leased": 0}}
    tiers = done(server, "reset", namespace=namespace[:8])["tiers"]
    assert tiers["host"]["blocks"] == tiers["disk"]["blocks"] == NUM_BLOCKS
    assert num_cached(server, ANN) == 0
    assert done(server, "reset", all=True)["tiers"]["device"]["blocks"] >= NUM_BLOCKS
    assert num_cached(server, ANN) == 0


def test_a_reset_says_that_what_machines_share_stays(tmp_path: Path, audit: Path, capsys: Any) -> None:
    url = f"file://{tmp_path}/objects"
    with operated(tmp_path, audit, remote={"url": url}) as server:
        server.complete(PROMPT, ANN, max_tokens=1)

        answer = done(server, "reset", all=True)
        assert main(["operate", "reset", "--tenant", "ann", "--url", server.url]) == 0

    assert f"blocks in {url} stay and are found again" in answer["note"]
    assert f"kvtier forget-remote {url} --namespace HEX" in answer["note"]
    assert answer["note"] in capsys.readouterr().out.splitlines()
    assert set(answer["tiers"]) == {"device", "host", "disk"}


def test_without_a_remote_tier_a_reset_says_nothing_of_it(server: ServerInThread) -> None:
    assert "note" not in done(server, "reset", all=True)


@pytest.mark.long
@pytest.mark.parametrize("of", ["tenant", "namespace", "all"])
def test_what_has_left_is_explained_as_cleared_with_its_time(of: str, server: ServerInThread) -> None:
    namespace = server.ask(lambda core: core.namespace.hex())
    server.complete(PROMPT, ANN, max_tokens=1)
    done(server, "spill")
    began_at = time.time()

    done(
        server,
        "reset",
        **{"tenant": {"tenant": "ann"}, "namespace": {"namespace": namespace}, "all": {"all": True}}[of],
    )

    answer = server.post("/v1/kvtier/explain", json={"prompt": PROMPT}, headers={"Authorization": f"Bearer {ANN}"})
    (row, *_) = answer.json()["data"][0]["rows"]
    assert (row["start"], row["end"], row["evicted"]["cause"]) == (0, ALL_FOUND, "cleared")
    assert began_at - 1 < row["evicted"]["first_at"] <= row["evicted"]["last_at"] < time.time() + 1


@pytest.mark.long
def test_the_oldest_of_a_tier_leave_and_what_is_below_is_still_found(server: ServerInThread) -> None:
    server.complete(PROMPT, ANN, max_tokens=1)
    done(server, "spill")

    assert done(server, "evict", tier="device", bytes="1GiB")["tiers"]["device"]["blocks"] >= NUM_BLOCKS
    assert done(server, "evict", tier="host", blocks=3)["tiers"]["host"]["blocks"] == 3
    assert num_cached(server, ANN) == ALL_FOUND  # from host memory and disk


@pytest.mark.long
def test_leased_blocks_stay_and_a_running_request_goes_on(server: ServerInThread) -> None:
    alone = server.complete(PROMPT, ANN, max_tokens=200)["choices"][0]["text"]
    with server.streaming(PROMPT, ANN, max_tokens=200) as events:
        text = next(events)["choices"][0]["text"]

        tiers = done(server, "reset", all=True)["tiers"]

        for event in events:
            text += event["choices"][0]["text"] if event["choices"] else ""
    assert tiers["device"]["leased"] >= NUM_BLOCKS
    assert text == alone


@pytest.mark.long
def test_a_pinned_prompt_stays_until_it_is_unpinned(server: ServerInThread) -> None:
    server.complete(PROMPT, ANN, max_tokens=1)

    pin = done(server, "pin", prompt=PROMPT, tenant="ann", seconds=600)
    assert pin["absent"] == 0
    assert done(server, "reset", all=True)["tiers"]["host"] == {"blocks": 0, "bytes": 0, "leased": NUM_BLOCKS}
    assert num_cached(server, ANN) == ALL_FOUND
    done(server, "unpin", pin=pin["pin"])
    assert done(server, "reset", all=True)["tiers"]["host"]["leased"] == 0
    assert operate(server, "unpin", {"pin": pin["pin"]}).status_code == 404
    assert num_cached(server, ANN) == 0


@pytest.mark.long
def test_check_tells_what_was_verified_and_waits_for_no_busy_moment(server: ServerInThread) -> None:
    verified = done(server, "check")["verified"]
    assert any("device, group 0" in what for what in verified)
    assert any(what.startswith("requests:") for what in verified)

    with server.streaming(PROMPT, ANN, max_tokens=500) as events:
        next(events)
        assert operate(server, "check").status_code == 409
        assert done(server, "check", now=True)["verified"]


@pytest.mark.long
def test_books_that_do_not_agree_are_told(server: ServerInThread) -> None:
    def spoil(core: object) -> None:
        core.cache.residency.groups[0].num_held += 1

    server.ask(spoil)

    answer = operate(server, "check")

    assert answer.status_code == 500
    assert "leases" in answer.json()["error"]["message"]
    server.ask(lambda core: setattr(core.cache.residency.groups[0], "num_held", 0))


@pytest.mark.long
def test_the_level_of_a_part_of_the_log_is_set_but_not_the_audits(server: ServerInThread) -> None:
    logger = logging.getLogger("kvtier.tiers")
    before = logger.level
    try:
        assert done(server, "log-level", logger="kvtier.tiers", level="debug")["level"] == "debug"
        assert logger.isEnabledFor(logging.DEBUG)
    finally:
        logger.setLevel(before)
    assert operate(server, "log-level", {"logger": "kvtier.audit", "level": "error"}).status_code == 400
    assert operate(server, "log-level", {"logger": "uvicorn", "level": "debug"}).status_code == 400


def test_only_an_operators_token_opens_and_it_opens_nothing_else(server: ServerInThread, audit: Path) -> None:
    assert operate(server, "reset", {"all": True}, token=ANN).status_code == 401
    assert server.post("/v1/kvtier/operate/reset", json={"all": True}).status_code == 401
    assert operate(server, "unknown").status_code == 404
    assert server.get("/v1/models", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 401
    (line,) = lines(audit)  # of both: the next one comes in a minute
    assert (line["who"], line["outcome"]) == (None, {"status": 401, "times": 1})


@pytest.mark.parametrize(
    ("verb", "asked", "param"),
    [
        ("reset", {}, "tenant"),
        ("reset", {"tenant": "a", "all": True}, "tenant"),
        ("reset", {"namespace": "zz"}, "namespace"),
        ("evict", {"tier": "host"}, "bytes"),
        ("evict", {"tier": "host", "bytes": "many"}, "bytes"),
        ("evict", {"tier": "host", "bytes": 0}, "bytes"),
        ("evict", {"tier": "tape", "blocks": 1}, "tier"),
        ("pin", {"seconds": 1}, "prompt"),
        ("log-level", {"level": "loud"}, "level"),
        ("log-level", {"level": "debug", "logger": "uvicorn"}, "logger"),
    ],
)
def test_a_mistake_is_told_with_the_fields_name(
    idle_server: ServerInThread, verb: str, asked: dict, param: str
) -> None:
    answer = operate(idle_server, verb, asked)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "regex" not in answer.json()["error"]["message"]


def test_each_verb_is_in_the_audit_log_without_a_prompt_or_salt(server: ServerInThread, audit: Path) -> None:
    server.complete(PROMPT, ANN, max_tokens=1)
    done(server, "pin", prompt=PROMPT, tenant="ann", salt="my secret", seconds=60)
    done(server, "reset", tenant="ann")
    refused = operate(server, "evict", {"tier": "host"})

    found = lines(audit)

    assert found[2]["request_id"] == refused.headers["x-request-id"]
    assert len({line["request_id"] for line in found}) == 3
    assert [(line["who"], line["verb"], line["outcome"]["status"]) for line in found] == [
        ("olga", "pin", 200),
        ("olga", "reset", 200),
        ("olga", "evict", 400),
    ]
    assert found[0]["arguments"] == {"seconds": 60, "tenant": "ann", "characters": len(PROMPT)}
    assert found[1]["outcome"]["tiers"]["host"]["blocks"] >= 0
    assert "Where were you" not in audit.read_text()
    assert "my secret" not in audit.read_text()
    assert audit.stat().st_mode & 0o077 == 0


def test_without_operators_there_are_no_such_routes() -> None:
    with serving(build("llama"), tables()) as address:
        assert operate(address, "reset", {"all": True}).status_code == 404


@pytest.mark.long
def test_requests_go_on_while_all_is_evicted(server: ServerInThread) -> None:
    """Many documents on all tiers, and a stream beside the reset: it gets the same tokens."""
    for number in range(20):
        server.complete(f"{number} {PROMPT}", BOB, max_tokens=1)
    done(server, "spill")
    alone = server.complete(PROMPT, ANN, max_tokens=150)["choices"][0]["text"]

    with server.streaming(PROMPT, ANN, max_tokens=150) as events:
        text = next(events)["choices"][0]["text"]
        tiers = done(server, "reset", tenant="bob")["tiers"]
        for event in events:
            text += event["choices"][0]["text"] if event["choices"] else ""

    assert tiers["disk"]["blocks"] >= 20 * NUM_BLOCKS
    assert text == alone
    come_true(server.is_at_rest)
    server.ask(lambda core: core.check())


@pytest.mark.long
def test_the_command_says_what_left_which_tier(server: ServerInThread, capsys: pytest.CaptureFixture[str]) -> None:
    server.complete(PROMPT, ANN, max_tokens=1)

    assert main(["operate", "spill", "--url", server.url]) == 0
    assert main(["operate", "reset", "--tenant", "ann", "--url", server.url]) == 0
    out = capsys.readouterr().out
    assert f"{NUM_BLOCKS} blocks evicted" in out
    assert main(["operate", "evict", "disk", "--blocks", "5", "--json", "--url", server.url]) == 0
    assert json.loads(capsys.readouterr().out)["tiers"] == {"disk": {"blocks": 0, "bytes": 0, "leased": 0}}
    assert main(["operate", "check", "--url", server.url]) == 0
    assert "verified: device, group 0" in capsys.readouterr().out
    assert main(["operate", "log-level", "info", "--logger", "kvtier.nothing", "--url", server.url]) == 0


@pytest.mark.long
def test_the_command_pins_and_unpins_a_file(
    server: ServerInThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    server.complete(PROMPT, ANN, max_tokens=1)
    command = ["operate", "pin", "--prompt", str(tmp_path / "prompt.txt"), "--seconds", "1h", "--tenant", "ann"]

    assert main([*command, "--url", server.url, "--json"]) == 0
    pin = json.loads(capsys.readouterr().out)
    assert pin["absent"] == 0
    assert main(["operate", "unpin", pin["pin"], "--url", server.url]) == 0


def test_the_command_tells_a_mistake_in_one_line(
    server: ServerInThread, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["operate", "unpin", "nothing", "--url", server.url]) == 2
    assert capsys.readouterr().err == "kvtier: there is no pin of that name, or it has ended\n"
    monkeypatch.setenv("KVTIER_OPERATOR_TOKEN", ANN)
    assert main(["operate", "check", "--url", server.url]) == 2
    assert "--token-file or KVTIER_OPERATOR_TOKEN" in capsys.readouterr().err
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert main(["operate", "check", "--url", server.url, "--token-file", str(tmp_path / "token")]) == 0
    monkeypatch.delenv("KVTIER_OPERATOR_TOKEN")
    capsys.readouterr()
    assert main(["operate", "check", "--url", server.url]) == 2
    assert "set KVTIER_OPERATOR_TOKEN" in capsys.readouterr().err
