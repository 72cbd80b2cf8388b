"""A remote store without the package that speaks to it: everything else works, and one line says what to install."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.engine.config import RemoteConfig
from kvtier.engine.stores.remote_store import remote_store
from kvtier.extras import MissingExtra


def test_the_engine_is_there_without_redis() -> None:
    script = "import sys; sys.modules['redis'] = None; import kvtier; print(kvtier.LLM.__name__)"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == ("LLM\n", "")


def test_without_redis_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("redis", "kvtier.store.remote.redis"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)

    with pytest.raises(MissingExtra, match=r"^remote rediss:// needs redis; pip install 'kvtier\[redis\]'$"):
        remote_store(RemoteConfig(url="rediss://cache:6379"))


def test_without_obstore_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)

    with pytest.raises(MissingExtra, match=r"^an object store needs obstore; pip install 'kvtier\[object\]'$"):
        remote_store(RemoteConfig(url=f"file://{tmp_path}"))
