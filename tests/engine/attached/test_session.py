"""A session whose other side does not read: what is kept to be sent has a bound."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.engine.attached import session as session_module
from kvtier.engine.attached.session import MAX_HINT_BYTES, Session, open_session
from kvtier.engine.attached.wire import VERSION, GroupShape, Hello, Refresh, Release, Welcome, frame_of
from kvtier.sidecar.port import listen_at_path

HELLO = Hello(VERSION, "a test", "a model", b"n" * 16, [GroupShape(16, False, 4096)])
NAMES = bytes(32 * 1000)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """One with a sidecar that reads nothing after the first message."""
    listener = listen_at_path(str(tmp_path / "s"))
    with ThreadPoolExecutor(1) as threads, listener, open(tmp_path / "segment", "w+b") as segment:
        opening = threads.submit(open_session, str(tmp_path / "s"), HELLO)
        connection, _ = listener.accept()
        connection.recv(1 << 16)
        socket.send_fds(connection, [frame_of(Welcome(VERSION, "a test", b"b" * 16, 4096))], [segment.fileno()])
        with connection:
            yield (session := opening.result())
            session.close()


def test_hints_that_nobody_reads_are_dropped(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_UNSENT_BYTES", MAX_HINT_BYTES + 2 * len(NAMES))
    for _ in range(200):
        session.send_hint(Refresh(0, NAMES, b""))

    assert session.is_sending
    assert session.is_open, "more is kept than MAX_UNSENT_BYTES"


def test_all_else_is_kept_up_to_a_bound(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_UNSENT_BYTES", 2 << 20)
    num_sent = 0
    while session.is_open:
        session.send(Release(1, NAMES))
        num_sent += 1
        assert num_sent < 1000

    assert num_sent * len(NAMES) > 2 << 20
    assert not session.is_sending
