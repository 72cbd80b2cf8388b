"""A model's name on the hub: what the hub says of it is known within seconds, and a hub that is away is asked once."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from small_models import build, byte_tokenizer

from kvtier.engine.model.checkpoint import Checkpoint
from kvtier.engine.model.hub import cached_folder, source_of

REVISION = "0123456789012345678901234567890123456789"


class Hub(HTTPServer):
    """A hub with the models `good/model` and `gated/model`, and a list of the requests that it got."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.asked: list[str] = []
        self.status: int | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubRequest(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.server.asked.append(self.path)
        if self.server.status is not None:
            self.send_response(self.server.status)
        elif self.path.startswith("/good/model/"):
            self.send_response(200)
            self.send_header("X-Repo-Commit", REVISION)
            self.send_header("ETag", '"1"')
        elif self.path.startswith("/gated/model/"):
            self.send_response(403)
            self.send_header("X-Error-Code", "GatedRepo")
        elif self.path.startswith("/bare/model/"):
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
        else:
            self.send_response(401)
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's files."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        serving = threading.Thread(target=made.serve_forever)
        serving.start()
        yield made
        made.shutdown()
        serving.join()


@pytest.fixture
def nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a hub that refuses connections."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        yield url


def cached(cache: Path, name: str) -> Path:
    """Put the small Llama into the cache as the hub model *name*."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / REVISION
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    build("llama").save_pretrained(snapshot)
    byte_tokenizer().save_pretrained(snapshot)
    return snapshot


def test_a_model_that_the_hub_has_is_loaded_by_its_name_and_not_asked_for_each_time(hub: Hub) -> None:
    assert [source_of("good/model") for _ in range(9)] == ["good/model"] * 9
    assert source_of("bare/model") == "bare/model"
    assert 2 <= len(hub.asked) < 9


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no/such-model", "the hub has no model of this name, or it is private and HF_TOKEN is not set"),
        ("gated/model", "accept it on the model's page, and set HF_TOKEN"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_the_reason(hub: Hub, name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        source_of(name)

    assert str(error.value).startswith(f"model {name}: cannot be loaded (")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["bad id", "a--b", "a..b", "model.git", "-a/b", "a" * 97, "ü/b", ""])
def test_a_name_that_no_hub_can_have_is_not_asked_for(hub: Hub, name: str) -> None:
    with pytest.raises(ValueError, match=r"there is no such folder, and a name on the hub has the form OWNER/MODEL"):
        source_of(name)

    assert cached_folder(name) is None
    assert hub.asked == []


def test_a_hub_that_is_away_is_asked_once_and_the_line_says_what_to_do(
    nothing: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=f"is not in the local cache, and {nothing} cannot be reached: .*refused"):
        source_of("good/model")
    with pytest.raises(ValueError, match="hf download good/model"):
        Checkpoint.of("good/model").config()

    assert caplog.records == []


def test_a_model_in_the_cache_is_loaded_from_there_if_the_hub_is_away(nothing: str, cache: Path) -> None:
    snapshot = cached(cache, "good/model")

    assert source_of("good/model") == str(snapshot)
    assert Checkpoint.of("good/model").config().model_type == "llama"
    assert Checkpoint.of("good/model").weights_bytes == (snapshot / "model.safetensors").stat().st_size


def test_a_model_in_the_cache_is_loaded_from_there_if_the_hub_has_an_error(hub: Hub, cache: Path) -> None:
    hub.status = 503
    with pytest.raises(ValueError, match=r"is not in the local cache, and http://.* answered with status 503"):
        source_of("not/cached")
    snapshot = cached(cache, "is/cached")

    assert source_of("is/cached") == str(snapshot)


@pytest.mark.long
def test_a_hub_that_accepts_connections_and_never_answers_is_given_up(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ValueError, match=r"(did not answer within 1 s|cannot be reached: .*timed? ?out)"):
            source_of("good/model")


def test_in_offline_mode_the_hub_is_not_asked(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached(cache, "is/cached")

    assert source_of("is/cached") == "is/cached"
    with pytest.raises(ValueError, match="is not in the local cache, and HF_HUB_OFFLINE is set"):
        source_of("good/model")
    assert hub.asked == []
