"""OpenStack Swift with its S3 API, on one machine: a real object store, from wheels, for tests.

`make .venv/swift/installed` makes its environment. Four processes: accounts, containers, objects, and the proxy that
answers S3's requests and verifies their signatures.
"""

import getpass
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.store import S3Store
from waiting import wait_for

PROGRAMS = Path(__file__).parents[2] / ".venv/swift/bin"
BUCKET = "kvtier-tests"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test:tester", "AWS_SECRET_ACCESS_KEY": "testing"}
REGION = "us-east-1"
PARTS = ("account", "container", "object")

SERVER = """\
[DEFAULT]
swift_dir = {folder}
devices = {folder}
mount_check = false
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
log_address = {folder}/none
"""
STORAGE = """\
[pipeline:main]
pipeline = {part}-server
[app:{part}-server]
use = egg:swift#{part}
"""
FILTERS = ("catch_errors", "cache", "listing_formats", "bulk", "s3api", "tempauth", "copy", "slo", "dlo")
OF_FILTERS = {
    "cache": "memcache_servers = 127.0.0.1:1\n",  # there is none; only tokens would need it
    "s3api": f"location = {REGION}\n",
    "tempauth": "user_test_tester = testing .admin\n",
}
PROXY = """\
[pipeline:main]
pipeline = {filters} proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
"""


@dataclass(frozen=True)
class SwiftServer:
    """A server that runs, with one empty bucket."""

    endpoint: str


@contextmanager
def swift_server(folder: Path) -> Iterator[SwiftServer]:
    """A server whose files are in the empty *folder*, until the end of the block."""
    ports = _free_ports(len(PARTS) + 1)
    (folder / "swift.conf").write_text("[swift-hash]\nswift_hash_path_prefix = a\nswift_hash_path_suffix = b\n")
    (folder / "device").mkdir()
    with ExitStack() as stack:
        for part, port in zip(PARTS, ports, strict=False):
            _make_ring(folder, part, port)
            stack.enter_context(_running(folder, part, port, STORAGE.format(part=part)))
        stack.enter_context(_running(folder, "proxy", ports[-1], _proxy_settings()))
        for port in ports:
            wait_for(lambda port=port: _answers(port))
        server = SwiftServer(f"http://127.0.0.1:{ports[-1]}")
        _make_bucket(server)
        yield server


def _free_ports(num_ports: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.create_server(("127.0.0.1", 0)))) for _ in range(num_ports)]
        return [int(server.getsockname()[1]) for server in sockets]


def _make_ring(folder: Path, part: str, port: int) -> None:
    """Where the parts of the store are: all on one device."""
    for words in (["create", "2", "1", "1"], ["add", f"r1z1-127.0.0.1:{port}/device", "1"], ["rebalance"]):
        command = [str(PROGRAMS / "swift-ring-builder"), f"{part}.builder", *words]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)


def _proxy_settings() -> str:
    filters = "".join(f"[filter:{name}]\nuse = egg:swift#{_egg(name)}\n{OF_FILTERS.get(name, '')}" for name in FILTERS)
    return PROXY.format(filters=" ".join(FILTERS)) + filters


def _egg(name: str) -> str:
    return "memcache" if name == "cache" else name


@contextmanager
def _running(folder: Path, part: str, port: int, settings: str) -> Iterator[None]:
    server = SERVER.format(folder=folder, port=port, user=getpass.getuser())
    (folder / f"{part}.conf").write_text(server + settings)
    with (folder / f"{part}.log").open("wb") as log:
        command = [str(PROGRAMS / f"swift-{part}-server"), str(folder / f"{part}.conf")]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _make_bucket(server: SwiftServer) -> None:
    store = S3Store(
        BUCKET,
        endpoint=server.endpoint,
        region=REGION,
        access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True},
    )
    signed = obstore.sign(store, "PUT", "", timedelta(minutes=5))
    urllib.request.urlopen(urllib.request.Request(signed, method="PUT", data=b"")).close()
