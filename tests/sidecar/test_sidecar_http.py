"""HTTP beside the sidecar: what it tells, what it does, and who may ask."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from layout_bed import layout
from prometheus_client.parser import text_string_to_metric_families
from sidecars import TOKEN, RunningSidecar, running_sidecar, small_config
from waiting import DEADLINE_S, wait_for

from kvtier.sidecar.config import HttpConfig
from kvtier.sidecar.endpoint import AttachedClient, ConnectorCounts, Lease, LeaseUse
from kvtier.sidecar.http.access import HEALTH, token_of
from kvtier.sidecar.http.app import PATHS
from kvtier.sidecar.http.serve_http import LIMITS, limits_of, serve_http
from kvtier.sidecar.sidecar import MAX_QUESTIONS
from kvtier.web.dashboard.assets import PAGE, REASONS
from kvtier.web.paths import DATA_PATHS, EXPLAIN


@pytest.fixture
def plain() -> Iterator[RunningSidecar]:
    with running_sidecar(small_config()) as running:
        yield running


@pytest.fixture
def with_disk(tmp_path: Path) -> Iterator[RunningSidecar]:
    with running_sidecar(small_config(tmp_path / "store")) as running:
        wait_for(lambda: running.get("/v1/kvtier/stats").json()["store"]["not_open"] is None)
        yield running


@pytest.fixture
def locked() -> Iterator[RunningSidecar]:
    with running_sidecar(small_config(http={"port": 0, "token": TOKEN})) as running:
        yield running


def attach(running: RunningSidecar) -> None:
    """Two clients, of which one has registered and loads."""
    now = running.sidecar.now()
    leases = (Lease(LeaseUse.PROMISED, 0, 3, now - 5.0), Lease(LeaseUse.WRITTEN, 0, 4, now - 9.0))
    running.endpoint.attached = [
        AttachedClient("instance 7, 127.0.0.1:4123", now - 60.0, layout(), leases),
        AttachedClient("connection 2", now, None),
    ]


def samples(running: RunningSidecar) -> dict[str, float]:
    text = running.get("/metrics").text
    return {
        sample.name + "".join(f",{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_sidecar_with_an_open_endpoint_and_backed_memory_is_alive_and_ready(plain: RunningSidecar) -> None:
    assert plain.get("/health").json() == {"status": "alive"}
    assert plain.get("/ready").json() == {"status": "ready"}


def test_a_sidecar_whose_endpoints_are_closed_is_alive_and_not_ready(plain: RunningSidecar) -> None:
    def close_endpoints() -> None:
        plain.sidecar.flush(0.0)

    plain.ask(close_endpoints)
    answer = plain.get("/ready")

    assert (answer.status_code, answer.json()) == (503, {"status": "no endpoint is open"})
    assert plain.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["stats", "tiers", "clients", "leases", "config"])
def test_the_numbers_are_below_kvtiers_prefix(plain: RunningSidecar, path: str) -> None:
    assert [plain.get(below + path).status_code for below in ("/v1/kvtier/", "/")] == [200, 404]


def test_the_deeds_are_below_kvtiers_prefix(plain: RunningSidecar) -> None:
    plain.store(1, 6)

    assert plain.post("/v1/kvtier/check").status_code == 200
    assert plain.post("/v1/kvtier/clear").status_code == 200
    assert plain.get("/v1/kvtier/tiers").json()["host"]["num_blocks"] == 0
    assert plain.post("/v1/kvtier/spill").json()["error"]["code"] == "no_disk"
    assert "no route" not in plain.post("/v1/kvtier/pin").text
    assert plain.post("/clear").status_code == 404


@pytest.mark.parametrize(
    "path",
    ["/health", "/ready", "/metrics", *(f"/v1/kvtier/{each}" for each in ("stats", "tiers", "clients", "leases"))],
)
def test_an_owner_that_is_stuck_is_a_503_and_not_a_hang(path: str) -> None:
    with running_sidecar(small_config(), answer_s=0.05) as running:
        wait_for(lambda: running.get("/health").status_code == 200)
        let_go = running.hold()
        answer = running.get(path)
        let_go()

        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stuck")
        wait_for(lambda: running.get(path).status_code == 200)


@pytest.mark.long
def test_by_default_a_stuck_owner_is_told_of_after_two_seconds(plain: RunningSidecar) -> None:
    config = small_config()
    with serve_http(plain.sidecar, config) as http:
        let_go = plain.hold()
        answer = replace(plain, port=http.port).get("/health")
        let_go()

    assert answer.status_code == 503
    assert "has not answered for 2 s" in answer.json()["error"]["message"]
    assert answer.elapsed.total_seconds() >= 2


def test_questions_to_a_stuck_owner_do_not_pile_up() -> None:
    with running_sidecar(small_config(), answer_s=0.001) as running:
        let_go = running.hold()
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: running.get("/health"), range(MAX_QUESTIONS + 20)))
        num_waiting = running.sidecar.num_asked
        let_go()

        assert {answer.status_code for answer in answers} == {503}
        assert num_waiting == MAX_QUESTIONS
        wait_for(lambda: running.get("/health").status_code == 200)


def test_tiers_and_layouts_show_what_engines_have_stored(with_disk: RunningSidecar) -> None:
    stored = with_disk.store(1, 6)
    with_disk.post("/v1/kvtier/spill")

    stats = with_disk.get("/v1/kvtier/stats").json()
    tiers = with_disk.get("/v1/kvtier/tiers").json()

    assert tiers == stats["tiers"]
    assert (tiers["host"]["num_blocks"], tiers["disk"]["num_blocks"]) == (6, 6)
    assert tiers["host"]["capacity_bytes"] == 4 << 20
    (shown,) = stats["layouts"]
    assert (shown["digest"], shown["weights"]) == (stored.digest.hex(), "not known")
    assert (shown["held_bytes"], shown["unsaved_chunks"]) == (1 << 20, 0)
    assert stats["lanes"]["store"]["num_bytes"] >= 6 * 4096
    assert stats["disk"]["breakers"] == {"read": "closed", "write": "closed"}


def test_weights_that_are_bound_are_shown(plain: RunningSidecar) -> None:
    plain.ask(lambda: plain.sidecar.layouts.open(replace(layout(), weights="revision 3")))

    assert plain.get("/v1/kvtier/stats").json()["layouts"][0]["weights"] == "revision 3"


def test_clients_and_their_leases_are_shown_with_their_age(plain: RunningSidecar) -> None:
    attach(plain)

    first, second = plain.get("/v1/kvtier/clients").json()["clients"]
    leases = plain.get("/v1/kvtier/leases").json()["leases"]

    assert (first["name"], first["leased_chunks"], first["layout"]["model"]) == ("instance 7, 127.0.0.1:4123", 7, "m")
    assert 60 <= first["attached_s"] < 60 + DEADLINE_S
    assert (second["name"], second["layout"]) == ("connection 2", None)
    assert [(lease["use"], lease["num_chunks"]) for lease in leases] == [("written", 4), ("promised", 3)]
    assert leases[0]["layout"] == layout().digest.hex()


def test_the_configuration_is_shown_without_secrets(tmp_path: Path) -> None:
    tables = {
        "http": {"port": 0, "token": TOKEN},
        "tenants": {"salt-of-ann": {"host": "1MiB", "name": "ann"}},
        "models": {"m": {"revision": "3"}},
    }
    config = small_config(**tables)
    command, password = "cat /the/key", "the-password"
    disk = {"path": str(tmp_path / "store"), "capacity": "64MiB", "encryption_key_command": command}
    remote = {"url": f"redis://ann:{password}@10.0.0.1:6379/0", "encryption_key_command": command}
    shown_config = small_config(**tables, disk=disk, remote=remote)
    with running_sidecar(config) as running, serve_http(running.sidecar, shown_config) as http:
        answer = replace(running, port=http.port).get("/v1/kvtier/config", headers={"Authorization": f"Bearer {TOKEN}"})

    shown = answer.json()
    assert not [text for text in (TOKEN, "salt-of-ann", command, password) if text in answer.text]
    assert shown["http"]["token"] == shown["disk"]["encryption_key_command"] == "(set)"
    assert (shown["remote"]["url"], shown["remote"]["encryption_key_command"]) == ("redis://10.0.0.1:6379/0", "(set)")
    assert shown["tenants"] == [{"host": 1 << 20, "disk": None, "name": "ann"}]
    assert (shown["host"]["capacity"], shown["models"]["m"]["revision"]) == (4 << 20, "3")


def test_metrics_are_of_the_sidecar_and_no_label_is_a_clients(with_disk: RunningSidecar) -> None:
    with_disk.store(1, 6, model="a-name-that-a-client-chose")
    attach(with_disk)
    with_disk.endpoint.counted = ConnectorCounts("open", 10, 8, 7, 6, {"late": 2}, {"LOOKUP": 5}, {"garbage": 1})
    with_disk.post("/v1/kvtier/spill")
    with_disk.get("/made/up")

    found = samples(with_disk)
    text = with_disk.get("/metrics").text

    assert found["kvtier_resident_blocks,host"] == found["kvtier_resident_blocks,disk"] == 6
    assert found["kvtier_capacity_bytes,host"] == found["kvtier_host_prepared_bytes"] == 4 << 20
    assert (found["kvtier_sidecar_ready"], found["kvtier_sidecar_clients"]) == (1, 2)
    assert (found["kvtier_sidecar_layouts"], found["kvtier_sidecar_unknown_weights_layouts"]) == (1, 1)
    assert found["kvtier_sidecar_asked_chunks_total,open"] == 10
    assert found["kvtier_sidecar_lost_chunks_total,open,late"] == 2
    assert found["kvtier_sidecar_operations_total,open,LOOKUP"] == 5
    assert found["kvtier_sidecar_refused_total,open,garbage"] == 1
    assert found["kvtier_http_requests_total,other,404"] == 1
    assert found["kvtier_disk_open"] == 1
    assert all(name.startswith("kvtier_") for name in found)
    assert found["kvtier_moved_bytes_total,host_to_disk"] >= 6 * 4096
    assert not [word for word in ("a-name-that", "/made", "instance 7") if word in text]


def test_spill_waits_until_everything_is_on_disk(with_disk: RunningSidecar) -> None:
    with_disk.store(1, 40)

    answer = with_disk.post("/v1/kvtier/spill?timeout_s=60")

    assert (answer.status_code, answer.json()) == (200, {"num_left": 0})
    assert with_disk.get("/v1/kvtier/tiers").json()["disk"]["num_blocks"] == 40


def test_spill_that_is_not_done_in_time_says_how_much_is_left(with_disk: RunningSidecar) -> None:
    def store_and_look() -> int:
        return with_disk.sidecar.saving().num_left

    with_disk.store(1, 6)
    with_disk.ask(with_disk.sidecar._transfers.close)  # noqa: SLF001  lanes that take nothing any more
    with_disk.store(2, 6)

    answer = with_disk.post("/v1/kvtier/spill?timeout_s=0")

    assert with_disk.ask(store_and_look) >= 6
    assert answer.status_code == 504
    assert "chunks are not on disk after 0 s" in answer.json()["error"]["message"]


def test_spill_without_a_disk_says_so(plain: RunningSidecar) -> None:
    answer = plain.post("/v1/kvtier/spill")

    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_disk")


def test_clear_forgets_all_layouts_or_one_and_tells_the_endpoints_first(with_disk: RunningSidecar) -> None:
    one, other = with_disk.store(1, 6, "one"), with_disk.store(1, 6, "other")
    with_disk.post("/v1/kvtier/spill")

    cleared = with_disk.post(f"/v1/kvtier/clear?layout={one.digest.hex()}").json()["cleared"]
    blocks = {each["model"]: each["host"]["num_blocks"] for each in with_disk.get("/v1/kvtier/stats").json()["layouts"]}

    assert (cleared, with_disk.endpoint.cleared) == ([one.digest.hex()], [one])
    assert blocks == {"one": 0, "other": 6}
    assert with_disk.post("/v1/kvtier/clear").json()["cleared"] == [one.digest.hex(), other.digest.hex()]
    wait_for(lambda: with_disk.get("/v1/kvtier/tiers").json()["disk"]["num_blocks"] == 0)


def test_clear_of_a_layout_that_is_not_there_clears_nothing(plain: RunningSidecar) -> None:
    plain.store(1, 6)

    answer = plain.post("/v1/kvtier/clear?layout=00")

    assert answer.status_code == 404
    assert plain.endpoint.cleared == []
    assert plain.get("/v1/kvtier/tiers").json()["host"]["num_blocks"] == 6


def test_check_is_200_while_the_books_agree_and_a_500_with_the_sentence_when_not(plain: RunningSidecar) -> None:
    plain.store(1, 6)
    good = plain.post("/v1/kvtier/check")
    plain.endpoint.damage = "endpoint: 3 leases, 2 accounted for"
    of_endpoint = plain.post("/v1/kvtier/check")
    plain.endpoint.damage = ""

    plain.ask(lambda: plain.sidecar.layouts.extents.touch(99))  # which nobody has
    of_layout = plain.post("/v1/kvtier/check")

    assert (good.status_code, good.json()) == (200, {"status": "in order", "num_layouts": 1})
    assert (of_endpoint.status_code, of_layout.status_code) == (500, 500)
    message = of_endpoint.json()["error"]["message"]
    assert message == "the bookkeeping is inconsistent: endpoint: 3 leases, 2 accounted for"
    assert "an extent is used and has no holder" in of_layout.json()["error"]["message"]


DEEDS = {"spill", "clear", "pin", "check"}
OPEN_OR_ELSEWHERE = {HEALTH, PAGE, REASONS, EXPLAIN, *DATA_PATHS}  # of the latter each has a test of its own


@pytest.mark.parametrize("path", sorted(PATHS - OPEN_OR_ELSEWHERE))
def test_with_a_token_everything_but_health_needs_it(locked: RunningSidecar, path: str) -> None:
    ask = locked.post if path.rpartition("/")[2] in DEEDS else locked.get
    without = ask(path)
    wrong = ask(path, headers={"Authorization": f"Bearer {TOKEN}x"})
    in_url = ask(f"{path}?token={TOKEN}")
    right = ask(path, headers={"Authorization": f"bearer {TOKEN}"})

    assert [without.status_code, wrong.status_code, in_url.status_code] == [401, 401, 401]
    assert right.status_code in (200, 400, 409)  # no body, no disk
    assert locked.get("/health").status_code == 200


def test_a_token_comes_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    with running_sidecar(small_config(http={"port": 0, "token_file": str(file)})) as running:
        assert running.get("/v1/kvtier/stats").status_code == 401
        assert running.get("/v1/kvtier/stats", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize(("mode", "is_told"), [(0o644, True), (0o600, False)])
def test_a_file_of_a_token_that_others_may_use_is_told_in_the_log(
    tmp_path: Path, mode: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(mode)

    assert token_of(HttpConfig(token_file=str(file))) is not None

    assert ("chmod 600" in caplog.text) == is_told
    assert TOKEN not in caplog.text


def test_a_page_in_a_browser_has_nothing_done_and_learns_nothing(plain: RunningSidecar) -> None:
    plain.store(1, 6)

    posted = plain.post("/v1/kvtier/clear", headers={"Origin": "http://evil.example"})
    rebound = plain.get("/v1/kvtier/clients", headers={"Host": "evil.example:9464"})

    assert (posted.status_code, rebound.status_code) == (403, 403)
    assert plain.get("/v1/kvtier/tiers").json()["host"]["num_blocks"] == 6
    assert plain.get("/v1/kvtier/tiers", headers={"Host": "[::1]:9464"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/kvtier/spill?timeout_s=nan", "timeout_s 'nan': give seconds from 0 to 60"),
        ("/v1/kvtier/spill?timeout_s=61", "timeout_s '61': give seconds from 0 to 60"),
        ("/v1/kvtier/spill?timeout_s=-1", "timeout_s '-1'"),
        ("/v1/kvtier/spill?timeout_s=ten", "timeout_s 'ten'"),
        ("/v1/kvtier/spill?timeout=1", "unknown option 'timeout'; use timeout_s"),
        ("/v1/kvtier/clear?layout=00&layout=01", "the option 'layout' is given twice"),
        ("/v1/kvtier/check?all=1", "unknown option 'all'; this route has no options"),
    ],
)
def test_an_option_that_is_nonsense_is_refused_in_a_sentence(plain: RunningSidecar, path: str, message: str) -> None:
    answer = plain.post(path)

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert "\n" not in answer.json()["error"]["message"]


def test_a_wrong_method_and_a_wrong_path_do_nothing(plain: RunningSidecar) -> None:
    assert plain.get("/v1/kvtier/clear").status_code == 405
    assert plain.post("/v1/kvtier/stats").status_code == 405
    missing = plain.get("/no/such")
    assert missing.status_code == 404
    assert "/metrics" in missing.json()["error"]["message"]
    assert json.loads(missing.text)


def test_headers_and_bodies_without_end_are_cut_off(plain: RunningSidecar) -> None:
    def send(start: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", plain.port), DEADLINE_S) as client:
            client.sendall(start)
            return client.recv(100)

    headers = send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * (LIMITS.max_header_bytes + 100))
    body = send(b"POST /v1/kvtier/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n")

    assert headers.startswith(b"HTTP/1.1 431")
    assert body.startswith(b"HTTP/1.1 200")  # nothing of it is waited for
    assert plain.get("/health").status_code == 200


def test_more_connections_than_there_may_be_are_turned_away(plain: RunningSidecar) -> None:
    limit = limits_of(small_config()).max_connections
    clients = [socket.create_connection(("127.0.0.1", plain.port), DEADLINE_S) for _ in range(limit)]
    try:
        with socket.create_connection(("127.0.0.1", plain.port), DEADLINE_S) as late:
            assert late.recv(100).startswith(b"HTTP/1.1 503")
    finally:
        for client in clients:
            client.close()

    wait_for(lambda: plain.get("/health").status_code == 200)


def test_a_port_that_is_taken_is_one_line_that_says_what_to_do(plain: RunningSidecar) -> None:
    with pytest.raises(
        OSError, match=r"http: cannot listen on 127.0.0.1:\d+ .*; choose another port in .http."
    ) as raised:
        serve_http(plain.sidecar, small_config(http={"port": plain.port}))

    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("token", "message"),
    [("short", "http.token_file .*: a key is shorter than 8"), (None, "http.token_file .*: No such file")],
)
def test_a_token_that_is_none_is_refused_in_a_line(
    plain: RunningSidecar, tmp_path: Path, token: str | None, message: str
) -> None:
    file = tmp_path / "token"
    if token is not None:
        file.write_text(token)

    with pytest.raises(ValueError, match=message):
        serve_http(plain.sidecar, small_config(http={"port": 0, "token_file": str(file)}))
