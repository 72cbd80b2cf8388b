"""kvtier's application in a real Ray: two replicas of one machine, the policy as their request router, one sidecar."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from foreign.running import free_port
from ray_cluster import REPLICA, Application, Cluster, running_ray
from serving import BLOCK_BYTES, BLOCK_SIZE, DEADLINE_S, MODEL, come_true

from kvtier.routing.question import COMPLETIONS

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")]

DEVICE_SLOTS = 120  # of which a document takes 50
TEXT = "The {} report says that the year was dry, and that the harvest was small in all parts of it. " * 9
NUM_DOCUMENTS = 20
PAGE = "https://chat.example"
MIN = 750  # tokens of a document that are found
SCHEDULER = {"load": "always", "prefill_chunk": 128, "token_budget": 256, "max_running": 8}
AUTOSCALING = {
    **{"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 0.0},
    **{"downscale_delay_s": 600.0, "metrics_interval_s": 0.2, "look_back_period_s": 1.0},
}
DEVICE = {"capacity": DEVICE_SLOTS * BLOCK_BYTES, "block_size": BLOCK_SIZE}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_ray() as found:
        yield found


@pytest.fixture(scope="module")
def apart(cluster: Cluster) -> Iterator[Application]:
    """Two replicas, each with host memory of its own. A device has room for six documents: what leaves it has been
    copied down long before, also on a busy machine, where a block that was not would just be gone."""
    engine = {
        "device": {**DEVICE, "capacity": 300 * BLOCK_BYTES},
        "host": {"capacity": 2000 * BLOCK_BYTES},
        "scheduler": SCHEDULER,
        "server": {"cors_origins": [PAGE]},
    }
    with cluster.application("apart", {"num_replicas": 2}, engine=engine) as found:
        yield found


def document(number: int) -> list[int]:
    """Its tokens: the small model's are bytes."""
    return list(TEXT.replace("{}", f"{number:03}").encode())


def complete(app: Application, prompt: list[int], **others: object) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **others}
    answer = app.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def cached(answer: httpx.Response) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
def test_what_replicas_have_in_device_and_in_host_memory_is_known_by_their_events(apart: Application) -> None:
    """Documents are on the devices of two replicas, or no longer. A router that was not asked for them knows where they
    are, and sends what comes there."""
    documents = [document(number) for number in range(NUM_DOCUMENTS)]
    apart.chosen_by_another([1])  # it listens from now on
    homes = [complete(apart, [*each, 1]).headers[REPLICA] for each in documents]
    for each, home in zip(documents, homes, strict=True):
        come_true(lambda each=each, home=home: sum(apart.known_by_another(each).get(home, {}).values()) >= MIN)
    known = [apart.known_by_another(each) for each in documents]

    found = [apart.chosen_by_another([*each, 2]) for each in documents]

    assert len(set(homes)) == 2, "one replica has all of them"
    assert all(each.keys() == {home} for each, home in zip(known, homes, strict=True))
    assert sum(each[home]["host"] >= MIN for each, home in zip(known, homes, strict=True)) >= 4
    assert sum(home == there for home, there in zip(homes, found, strict=True)) >= NUM_DOCUMENTS - 2
    assert all(cached(complete(apart, [*each, 3])) >= MIN for each in documents)


@pytest.mark.slow
def test_a_busy_replica_is_avoided(apart: Application) -> None:
    prompt = document(100)
    home = complete(apart, prompt).headers[REPLICA]

    with ThreadPoolExecutor(24) as asking:
        answers = [asking.submit(complete, apart, [*prompt, i], max_tokens=100) for i in range(24)]
        there = [each.result().headers[REPLICA] for each in answers]

    assert {home} < set(there)


def test_a_chat_is_found_by_its_tokens_and_streams(apart: Application) -> None:
    text = bytes(document(200)).decode()
    first = apart.chat(text)
    again = apart.chat(text + "Why?")
    with apart.streaming(text, max_tokens=20) as stream:
        texts = [event["choices"][0]["text"] for event in stream]
    whole = apart.complete(text, max_tokens=20)["choices"][0]["text"]

    assert again.headers[REPLICA] == first.headers[REPLICA]
    assert cached(again) >= MIN
    assert len(texts) > 1
    assert "".join(texts) == whole


def test_errors_are_the_servers(apart: Application) -> None:
    assert apart.post(COMPLETIONS, json={"model": "other", "prompt": "x"}).json()["error"]["code"] == "model_not_found"
    assert apart.post(COMPLETIONS, content=b"{").status_code == 400
    assert apart.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert apart.get("/nothing").status_code == 404


def test_a_page_of_another_site_is_refused_and_one_that_is_named_may_ask(apart: Application) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        refused = apart.post(COMPLETIONS, json=body, headers=headers)
        assert (refused.status_code, REPLICA in refused.headers) == (403, False)  # no replica was asked
    named = apart.get("/v1/models", headers={"Origin": PAGE})
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    before = httpx.options(apart.url + COMPLETIONS, headers=asked, timeout=DEADLINE_S)
    assert named.headers["access-control-allow-origin"] == PAGE
    assert (before.status_code, before.headers["access-control-allow-origin"]) == (200, PAGE)
    assert apart.get("/v1/models", headers={"Host": "kvtier.default.svc"}).status_code == 200


def test_replicas_of_a_node_share_a_sidecar_that_outlives_them(cluster: Cluster, tmp_path: Path) -> None:
    """A replica that comes later has what the first one computed, also when that is gone; the sidecar ends with the
    application."""
    engine = {"device": DEVICE, "scheduler": SCHEDULER}
    port = free_port()
    sidecar = {
        "host": {"capacity": "16MiB"},
        "extent": "1MiB",
        "disk": {"path": str(tmp_path / "store"), "capacity": "64MiB"},
        "http": {"port": port},
    }
    with cluster.application("shared", {"autoscaling_config": AUTOSCALING}, engine=engine, sidecar=sidecar) as app:
        first = complete(app, document(0)).headers[REPLICA]
        with app.streaming(document(9), max_tokens=1000) as stream:
            next(stream)
        come_true(lambda: _finished(app).get("abort") == 1)  # its client has left

        come_true(lambda: _sidecar(port, "tiers")["host"]["num_blocks"] >= MIN // BLOCK_SIZE)
        with ThreadPoolExecutor(4) as asking:  # more at once than one replica should have
            while len(_sidecar(port, "clients")["clients"]) < 2:
                list(asking.map(lambda number: complete(app, document(number), max_tokens=100), range(1, 5)))
        come_true(lambda: app.num_running() == 2)

        app.kill(first)
        answer = complete(app, document(0))

        assert answer.headers[REPLICA] != first
        assert cached(answer) >= MIN

        before = _processes(port)
        os.kill(before[0], signal.SIGKILL)
        come_true(lambda: _processes(port) not in (before, []))
        come_true(lambda: _answers(port) and len(_sidecar(port, "clients")["clients"]) > 0)
    come_true(lambda: not _processes(port))


def _sidecar(port: int, what: str) -> dict:
    return httpx.get(f"http://127.0.0.1:{port}/v1/kvtier/{what}", timeout=DEADLINE_S).json()


def _finished(app: Application) -> dict[str, int]:
    """Requests by why they ended, of an application with one replica."""
    return app.get("/v1/kvtier/stats").json()["requests"]["served"]["finished"]


def _processes(port: int) -> list[int]:
    """The sidecars that listen at this port."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{line[9]}]" for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"sidecar_process" not in (process / "cmdline").read_bytes():
                continue
            if any(os.readlink(file) in sockets for file in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def _answers(port: int) -> bool:
    try:
        _sidecar(port, "tiers")
    except httpx.HTTPError:
        return False
    return True


def test_a_killed_replica_is_forgotten_and_its_requests_are_answered(apart: Application) -> None:
    prompt = document(300)
    home = complete(apart, prompt).headers[REPLICA]
    expected = complete(apart, prompt, max_tokens=200).json()["choices"]

    with ThreadPoolExecutor(4) as asking:
        answers = [asking.submit(complete, apart, prompt, max_tokens=200) for _ in range(4)]
        apart.kill(home)
        texts = [each.result().json()["choices"] for each in answers]

    assert texts == [expected] * 4
    assert complete(apart, prompt).headers[REPLICA] != home
    assert cached(complete(apart, prompt)) >= MIN
