"""`kvtier top` in a real terminal, over HTTP, of a real sidecar."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from layout_bed import layout
from sidecars import TOKEN, RunningSidecar, running_sidecar, small_config
from waiting import DEADLINE_S

from kvtier.cli.main import main
from kvtier.sidecar.endpoint import AttachedClient, ConnectorCounts, Lease, LeaseUse


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningSidecar]:
    with running_sidecar(small_config(tmp_path / "store")) as made:
        made.store(1, 6, "a-model")
        made.post("/v1/kvtier/spill")
        now = made.sidecar.now()
        lease = Lease(LeaseUse.READ, 0, 3, now - 5.0)
        made.endpoint.attached = [AttachedClient("instance 7 \x1b[2J", now - 7300.0, layout("a-model"), (lease,))]
        made.endpoint.counted = ConnectorCounts("open", 10, 8, 7, 6, {"late": 2})
        yield made


def test_one_view_has_tiers_hits_lanes_clients_and_leases(
    running: RunningSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["top", running.url, "--once"])

    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines if line.split()}
    assert status == 0
    assert lines[0].startswith("kvtier sidecar ready")
    assert rows["host"].split() == ["host", "24.0", "KiB", "4.0", "MiB", "0.6%", "6", "0", "0"]
    assert rows["disk"].split()[-3:] == ["6", "0", "0"]
    assert "80.0%" in rows["open"]
    assert rows["store"].split()[-3:] == ["24.0", "KiB", "0"]
    assert "not known" in rows["a-model"]
    assert "2 h 1 min" in rows["instance"]
    assert "\x1b" not in "".join(lines), "a client's name reaches the terminal"
    assert rows["read"].split()[-3:-1] == ["3", "5"]


def test_tables_without_rows_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_sidecar(small_config(tmp_path / "store")) as fresh:
        status = main(["top", fresh.url, "--once"])

    out = capsys.readouterr().out
    assert status == 0
    assert "tier" in out
    assert [title for title in ("lane", "layout", "client", "lease") if re.search(rf"^ *{title}", out, re.M)] == []


@contextmanager
def in_terminal(*arguments: str) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """`kvtier` with a terminal of its own; the process, and the terminal's other end."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "110", "LINES": "60"}
    command = [sys.executable, "-m", "kvtier.cli.main", *arguments]
    # A test run in the background of a shell ignores Ctrl-C, and so would what it starts.
    script = f"import os, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv({command[0]!r}, {command!r})"
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield child, ours
    finally:
        child.kill()
        child.wait(DEADLINE_S)
        os.close(ours)


def read_until(terminal: int, pattern: str, seen: str = "") -> str:
    """What the terminal shows up to *pattern*."""
    give_up_at = time.monotonic() + DEADLINE_S
    while not re.search(pattern, seen):
        assert time.monotonic() < give_up_at, f"{pattern!r} never came: {seen[-2000:]}"
        assert select.select([terminal], [], [], DEADLINE_S)[0], f"{pattern!r} never came: {seen[-2000:]}"
        seen += os.read(terminal, 65536).decode(errors="replace")
    return seen


@pytest.mark.long
def test_the_view_lives_in_a_terminal_and_ends_with_ctrl_c(running: RunningSidecar) -> None:
    with in_terminal("top", running.url, "--interval", "0.1") as (child, terminal):
        first = read_until(terminal, "24.0 KiB")
        running.store(2, 6, "another-model")
        read_until(terminal, "another-model")
        running.ask(lambda: running.sidecar.flush(0.0))
        read_until(terminal, "no endpoint is open")
        child.send_signal(signal.SIGINT)
        last = read_until(terminal, "kvtier: stopped")

        assert "\x1b[?1049h" in first, "it is not on a screen of its own"
        assert "\x1b[?1049l" in last, "the screen from before does not come back"
        assert child.wait(DEADLINE_S) == 128 + signal.SIGINT


@pytest.mark.long
def test_q_ends_the_view_and_gives_the_terminal_back(running: RunningSidecar) -> None:
    with in_terminal("top", running.url, "--interval", "3600") as (child, terminal):
        read_until(terminal, "24.0 KiB")
        before = termios.tcgetattr(terminal)[3] & termios.ICANON
        os.write(terminal, b"xq")
        read_until(terminal, r"\x1b\[\?1049l")

        assert child.wait(DEADLINE_S) == 0
        assert (before, termios.tcgetattr(terminal)[3] & termios.ICANON) == (0, termios.ICANON)


@pytest.mark.long
def test_a_sidecar_that_goes_away_is_told_of_and_looked_for_again(tmp_path: Path) -> None:
    with running_sidecar(small_config(tmp_path / "store")) as first:
        config = small_config(tmp_path / "store", http={"port": first.port})
        context = in_terminal("top", first.url, "--interval", "0.1")
        child, terminal = context.__enter__()
        read_until(terminal, "sidecar .*ready")
    try:
        read_until(terminal, "no answer: .*is the server or sidecar running")
        with running_sidecar(config) as second:
            second.store(1, 6, "after-the-restart")
            read_until(terminal, "after-the-restart")
        assert child.poll() is None
    finally:
        context.__exit__(None, None, None)


def test_a_sidecar_with_a_token_is_read_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    with running_sidecar(small_config(http={"port": 0, "token": TOKEN})) as locked:
        without = main(["top", locked.url, "--once"])
        refused = capsys.readouterr().err
        right = main(["top", locked.url, "--once", "--token-file", str(file)])

    assert (without, right) == (2, 0)
    assert "the server needs a key; give --token-file FILE or set KVTIER_API_KEY" in refused


def test_a_redirect_is_not_followed_and_a_proxy_not_asked(
    running: RunningSidecar, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"{running.url}{self.path}")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        redirected = main(["top", f"http://127.0.0.1:{server.server_port}", "--once"])
        server.shutdown()

    assert redirected == 2
    assert "302 Found" in capsys.readouterr().err
    assert main(["top", running.url, "--once"]) == 0


@pytest.mark.parametrize("reply", [b"[]", b"{}", b"not JSON", b'{"ready": 1}'])
def test_what_is_no_sidecar_is_one_line(reply: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status = main(["top", f"http://127.0.0.1:{server.server_port}", "--once"])
        server.shutdown()

    said = capsys.readouterr().err
    assert status == 2
    assert (said.startswith("kvtier: "), said.count("\n")) == (True, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://x"], "is not a URL; write http://HOST:PORT"),
        (["localhost:9464"], "is not a URL; write http://HOST:PORT"),
        (["http://127.0.0.1:99999"], "is not a URL; write http://HOST:PORT"),
        (["http://[::1"], "is not a URL; write http://HOST:PORT"),
        (["http://me:secret@127.0.0.1:1"], "the URL contains a user name or password; give only the address"),
        (["--interval", "0"], "is not a number of seconds from 0.1 to 3600"),
        (["--interval", "nan"], "is not a number of seconds"),
        (["--token-file", "/no/such"], "No such file"),
    ],
)
def test_nonsense_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["top", *arguments])
    except SystemExit as error:
        status = int(error.code or 0)

    said = capsys.readouterr().err
    assert (status, said.count("\n")) == (2, 1)
    assert message in said
    assert "secret" not in said


@pytest.mark.parametrize("key", ["sk-secret two", "sk-secret\nX-Other: 1", "sk-secr\xe9t"])
@pytest.mark.parametrize("is_in_file", [True, False], ids=["from a file", "from the environment"])
def test_a_key_that_no_header_can_have_is_one_line_without_the_key(
    key: str, is_in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    file.write_text(key)
    if not is_in_file:
        monkeypatch.setenv("KVTIER_API_KEY", key)

    status = main(["top", "http://127.0.0.1:1", "--once", *(["--token-file", str(file)] if is_in_file else [])])

    said = capsys.readouterr().err
    assert (status, said.count("\n")) == (2, 1)
    assert "the token has a space or another invalid character; give only the token" in said
    assert "secr" not in said


def test_a_port_where_nothing_listens_says_what_to_look_for(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        status = main(["top", f"http://127.0.0.1:{free.getsockname()[1]}", "--once"])

    assert status == 2
    assert "is the server or sidecar running, and is this its HTTP port?" in capsys.readouterr().err


def test_the_answer_of_clients_is_json_that_other_programs_read(running: RunningSidecar) -> None:
    assert json.loads(running.get("/v1/kvtier/clients").text)["clients"][0]["name"] == "instance 7 \x1b[2J"
