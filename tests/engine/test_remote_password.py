"""The file with the password of a Redis: what is taken from it, and which file is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import RedisServer, running_server
from remote_cases import needs_redis, put_blocks

from kvtier.engine.config import RemoteConfig
from kvtier.engine.stores.remote_store import remote_store

WORD = "keeper-word"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(WORD + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_server(tmp_path / "redis", "--requirepass", WORD) as running:
        yield running


@needs_redis
def test_the_password_is_the_files_only_line(file: Path, server: RedisServer) -> None:
    config = RemoteConfig(url=f"redis://{server.address}", password_file=str(file))

    with remote_store(config) as store:
        assert put_blocks(store, 1) == [True]


@needs_redis
def test_a_password_that_others_may_read_is_refused(file: Path) -> None:
    file.chmod(0o604)

    with pytest.raises(
        ValueError, match=r"password in .*: other users may use it \(mode 0604\); run: chmod 600"
    ) as why:
        remote_store(RemoteConfig(url="redis://127.0.0.1", password_file=str(file)))

    assert WORD not in str(why.value)


@needs_redis
@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_password_that_cannot_be_read_is_told_in_a_line(file: Path, content: bytes | None) -> None:
    file.unlink()
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)

    with pytest.raises(ValueError, match=r"the password in .*(: No such file| is not UTF-8 text)") as why:
        remote_store(RemoteConfig(url="redis://127.0.0.1", password_file=str(file)))

    assert "\n" not in str(why.value)
