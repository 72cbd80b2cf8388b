"""The process that is a node's sidecar: what other users of the machine can see of it."""

import os
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
from serving import come_true

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")

SECRETS = ("token-of-the-operator", "s3cret-of-the-store")


def test_no_secret_is_in_the_arguments_or_in_the_environment_of_the_sidecar(tmp_path: Path) -> None:
    from kvtier.routing.ray_serve.node_sidecar import NodeSidecar

    path = tmp_path / "engines.sock"
    tables = {
        "host": {"capacity": "64MiB"},
        "lmcache": None,
        "http": {"port": 0, "token": SECRETS[0]},
        "remote": {"url": f"redis://user:{SECRETS[1]}@127.0.0.1:1/0"},
        "socket": {"path": str(path)},
    }
    keeper = NodeSidecar.__new__(NodeSidecar)  # without Ray, which makes the others
    keeper._tables = tables  # noqa: SLF001  as Ray's actor has them
    process = keeper._start()  # noqa: SLF001
    try:
        come_true(lambda: process.poll() is not None or is_listening(path), pause_s=0.1)
        assert process.poll() is None, "the tables have not come"
        seen = [Path(f"/proc/{process.pid}/{name}").read_text() for name in ("cmdline", "environ")]
    finally:
        process.terminate()
        process.wait()

    assert not [secret for secret in SECRETS for text in seen if secret in text]
    assert os.getpid() == int(seen[0].split("\0")[3])


def is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0
