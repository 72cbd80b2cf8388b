"""`kvtier top` of a real `kvtier serve`: requests, latencies, tokens and tiers; other servers are one line."""

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from serving import ServerInThread, serving, tables
from small_models import build
from waiting import DEADLINE_S

from kvtier.cli.main import main
from kvtier.cli.top.command import NoAnswer, Watched

PROMPT = "The clerk counted the barrels, and wrote it down. " * 6


@pytest.fixture(scope="module")
def server() -> Iterator[ServerInThread]:
    with serving(build("llama"), tables()) as made:
        for _ in range(2):
            asked = {"model": made.service.models.name, "prompt": PROMPT, "max_tokens": 4}
            httpx.post(f"{made.url}/v1/completions", json=asked, timeout=DEADLINE_S).raise_for_status()
        yield made


def test_one_view_has_requests_latencies_sources_and_tiers(
    server: ServerInThread, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["top", server.url, "--once"])

    out, err = capsys.readouterr()
    stats = httpx.get(f"{server.url}/v1/kvtier/stats", timeout=DEADLINE_S).json()
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()}
    assert (status, err) == (0, "")
    assert out.startswith(f"kvtier serve {server.service.models.name}   {server.url}\n")
    assert "requests: 0 running, 0 waiting, 0 loading, 2 finished" in out
    assert re.search(r"^ *latency +p50 +p90 +p99 +of", out, re.MULTILINE)
    assert rows["first"][-4:] == ["2", "since", "the", "start"]
    assert rows["computed"][1] == f"{stats['tokens']['recomputed']:,}"
    assert rows["host"][-1] == "0"
    assert max(map(len, out.splitlines())) <= 110


def test_the_second_view_has_rates_and_latencies_of_the_last_minute(
    server: ServerInThread, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = Watched(server.url, None)
    watched.look()
    asked = {"model": server.service.models.name, "prompt": PROMPT, "max_tokens": 4}
    httpx.post(f"{server.url}/v1/completions", json=asked, timeout=DEADLINE_S).raise_for_status()
    Console(width=110).print(watched.look())

    out = capsys.readouterr().out
    assert re.search(r"output: [0-9.,]+ tokens/s", out)
    assert re.search(r"first token .* 1 last minute", out)
    assert re.search(r"device +[0-9,]+ +[0-9.]+% +[1-9][0-9,]*/s", out)


def test_the_url_of_the_api_is_accepted_as_well(server: ServerInThread, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", f"{server.url}/v1/", "--once"]) == 0


def test_a_server_with_keys_is_read_with_one_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("sk-the-one-key\n")
    config = tables(tenant_isolation="off")
    with serving(build("llama"), config, keys={"sk-the-one-key": "one"}) as locked:
        without = main(["top", locked.url, "--once"])
        refused = capsys.readouterr().err
        with_file = main(["top", locked.url, "--once", "--token-file", str(tmp_path / "token")])
        monkeypatch.setenv("KVTIER_API_KEY", "sk-the-one-key")
        with_environment = main(["top", locked.url, "--once"])

    assert (without, with_file, with_environment) == (2, 0, 0)
    assert "the server needs a key; give --token-file FILE or set KVTIER_API_KEY" in refused


@pytest.mark.parametrize(
    ("status", "reply", "said"),
    [
        (404, b'{"error": {"message": "no such route: GET /v1/kvtier/stats; The routes are ..."}}', "is not a kvtier"),
        (404, b"<html>", "is not a kvtier server or sidecar"),
        (200, b"[]", "is not a kvtier server or sidecar"),
        (200, b'{"cache": {}}', "has another version of kvtier"),
        (503, b'{"error": {"message": "the model is being loaded: reading"}}', "the model is being loaded: reading"),
        (500, b'{"error": {"message": "' + b"route " * 200 + b'"}}', "route route"),
    ],
)
def test_what_is_no_server_of_this_version_is_one_short_line(status: int, reply: bytes, said: str) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(NoAnswer, match=said) as error:
            Watched(f"http://127.0.0.1:{server.server_port}", None).look()
        server.shutdown()

    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
