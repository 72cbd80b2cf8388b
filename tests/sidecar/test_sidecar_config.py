"""The sidecar's configuration, and which weights a model's name stands for."""

from pathlib import Path

import pytest

from kvtier.engine.config import ConfigError
from kvtier.sidecar.config import ModelWeightsConfig, sidecar_config
from kvtier.sidecar.process import weights_digest, weights_of


def written(folder: Path, text: str) -> Path:
    file = folder / "sidecar.toml"
    file.write_text(text)
    return file


def test_without_a_file_there_is_host_memory_and_a_endpoint_and_no_disk() -> None:
    config = sidecar_config(None, {})

    assert config.host.capacity == 4 << 30
    assert config.disk is None
    assert config.lmcache is not None
    assert config.lmcache.listen == "tcp://127.0.0.1:5555"


def test_what_is_given_replaces_the_files_keys_and_leaves_the_others(tmp_path: Path) -> None:
    file = written(tmp_path, '[disk]\npath = "/kv"\ncapacity = "1GiB"\n[host]\ncapacity = "1GiB"\n')

    config = sidecar_config(file, {"disk": {"capacity": "2GiB"}})

    assert config.disk is not None
    assert (config.disk.path, config.disk.capacity, config.host.capacity) == ("/kv", 2 << 30, 1 << 30)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_http_on_this_machine_alone_needs_no_token_and_elsewhere_one(tmp_path: Path, host: str) -> None:
    config = sidecar_config(written(tmp_path, f"[http]\nhost = '{host}'\nport = 'none'"), {})
    elsewhere = sidecar_config(written(tmp_path, "[http]\nhost = '0.0.0.0'\ntoken = 'a-long-token'"), {})

    assert (config.http.port, config.http.has_token, elsewhere.http.has_token) == ("none", False, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[hsot]", r"\$.hsot: unknown key; did you mean host\?"),
        ("[host]\ncapacty = 1", r"\$.host.capacty: unknown key; did you mean capacity\?"),
        ("[lmcache]\nlisten = 'tcp://0.0.0.0:5555'", "LMCache's protocol has no authentication"),
        (
            "[lmcache]\nlisten = 'udp://127.0.0.1:1'",
            r"\$.lmcache.listen: not a valid address; write it as tcp://127.0.0.1:5555",
        ),
        (
            "[tracing]\nendpoint = 'collector'",
            r"\$.tracing.endpoint: not a valid address; write it as http://127.0.0.1:4318",
        ),
        ("[lmcache]\nchunk_tokens = 3", r"\$.lmcache.chunk_tokens"),
        ("[http]\nhost = '0.0.0.0'", "host 0.0.0.0 can be reached from other machines: give token_file"),
        ("[http]\nhost = '::'", "host :: can be reached from other machines"),
        ("[http]\nhost = 'localhost.example'", "can be reached from other machines"),
        ("[http]\nport = 65536", r"\$.http.port"),
        ("[http]\nport = 'web'", r"\$.http.port: .*; use one of a number, none$"),
        ("[http]\ntoken = 'x'\ntoken_file = 'y'", "token and token_file are both set; give one of them"),
        ("[http]\ntoken = ''", r"\$.http.token"),
        ("[http]\ntokn = 'x'", r"\$.http.tokn: unknown key; did you mean token"),
        ("[models.a]", r"models\[...\]: give either path \(of the weights\) or revision"),
        ("[models.a]\npath = 'x'\nrevision = 'y'", r"give either path \(of the weights\) or revision"),
        ("extent = 5000", "use a multiple of 4096"),
        ("[host]\ncapacity = '32MiB'", "use 67108864 \\(one extent\\) or more"),
        ("[disk]\npath = 'x'\ncodec = 'fp8'", "disk.codec fp8 is for one dtype"),
    ],
)
def test_a_mistake_is_one_line_with_its_path_and_what_to_do(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        sidecar_config(written(tmp_path, text), {})

    assert "\n" not in str(raised.value)


def test_weights_have_another_digest_when_any_file_of_them_differs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-00001.safetensors").write_bytes(b"first")
    (tmp_path / "model-00002.safetensors").write_bytes(b"second")
    before = weights_digest(tmp_path)

    (tmp_path / "README.md").write_text("nothing that computes")
    assert weights_digest(tmp_path) == before
    (tmp_path / "model-00002.safetensors").write_bytes(b"third")
    changed = weights_digest(tmp_path)
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')

    assert len({before, changed, weights_digest(tmp_path)}) == 3


def test_a_model_is_bound_by_its_weights_or_by_a_revision(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"weights")
    models = {
        "a": ModelWeightsConfig(path=str(tmp_path / "model.gguf")),
        "b": ModelWeightsConfig(revision="2026-11"),
    }

    found = weights_of(models)

    assert found["a"].startswith("sha256 ")
    assert found["b"] == "revision 2026-11"


def test_a_folder_without_weights_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no weights .*; give the folder of the weights, or give revision"):
        weights_digest(tmp_path)
