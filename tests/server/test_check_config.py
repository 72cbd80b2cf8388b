"""`kvtier serve --check-config` prints the plan without loading weights, and finds what the server would refuse."""

import re
import shutil
from pathlib import Path

import fake_cuda
import pytest
import torch
from small_models import MODELS, MORE_MODELS, build, byte_tokenizer
from state_models import build_states

from kvtier.cli.main import main
from kvtier.engine.build_core import build_core
from kvtier.engine.config import as_config
from kvtier.engine.model.gpu_share import LIBRARY_BYTES
from kvtier.server.plan import make_plan
from kvtier.server.settings_without_effect import settings_without_effect

BLOCK_BYTES = 16 * 1024  # of every small model in float32, at 16 tokens


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def no_weights(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model's folder without the weights of its layers."""
    folder = tmp_path_factory.mktemp("described") / "small-llama"
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def check(
    capsys: pytest.CaptureFixture[str], folder: Path, model: Path, config: str, *arguments: str
) -> tuple[int, str, str]:
    """Run `kvtier serve --check-config`: its exit status, stdout and stderr."""
    file = folder / "kvtier.toml"
    file.write_text(config)
    capsys.readouterr()
    status = main(["serve", "--model", str(model), "--config", str(file), "--check-config", *arguments])
    return status, *capsys.readouterr()


def test_it_tells_what_fits_where_without_loading_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, no_weights: Path
) -> None:
    config = '[device]\ncapacity = "1MiB"\nblock_size = 16\n[host]\ncapacity = "2MiB"\n'

    status, out, _ = check(capsys, tmp_path, no_weights, config)

    assert status == 0
    assert "1,024 bytes per token, 16,384 per block of 16 tokens" in out
    assert "64 blocks        1,024 tokens" in out
    assert "128 blocks        2,048 tokens" in out
    assert "longest    1,024 tokens" in out
    assert "requests from 1,025 to 4,096 tokens: device.capacity 4.0 MiB would hold them" in out
    assert "refused" not in out
    assert "has no effect" not in out


def test_options_take_the_place_of_the_configuration_s(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, no_weights: Path
) -> None:
    config = f'''
[device]
capacity = "8MiB"
block_size = 32
gpu_memory_utilization = 0.5
[host]
capacity = "8MiB"
[disk]
path = "{tmp_path}/other"
capacity = "1GiB"
durability = "interval"
'''
    options = ["--block-size", "16", "--device-memory", "1MiB", "--host-memory", "2MiB"]

    status, out, _ = check(capsys, tmp_path, no_weights, config, *options, "--disk", f"{tmp_path}/store:64MiB")

    assert status == 0
    assert "16,384 per block of 16 tokens" in out
    assert re.search(r"device +1.0 MiB +64 blocks +1,024 tokens\n", out)
    assert re.search(r"host +2.0 MiB +128 blocks +2,048 tokens\n", out)
    assert re.search(
        rf"disk +\d\d.\d MiB .* in {tmp_path}/store, of 64.0 MiB: \d\d.\d MiB for blocks, .* in reserve\n", out
    )
    assert "has no effect" not in out  # the other keys of [disk] stay: only an interval has checkpoints


def test_it_tells_what_a_part_of_a_gpu_comes_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, no_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with fake_cuda.installed(fake_cuda.Late()):
        status, out, _ = check(capsys, tmp_path, no_weights, "", "--gpu-memory-utilization", "0.5")
        refused, _, err = check(capsys, tmp_path, no_weights, "", "--gpu-memory-utilization", "0.01")

    assert status == 0
    pool_mib = float(re.search(r"device +([\d.]+) GiB .*, 0.5 of 16.0 GiB, less weights \d", out)[1]) * 1024
    assert 6.5 * 1024 < pool_mib < 8 * 1024 - LIBRARY_BYTES / (1 << 20)
    assert refused == 2
    assert "gpu_memory_utilization 0.01: this allows 163.8 MiB, but weights and a step need" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("options", [[], ["--check-config"]])
def test_a_part_of_a_gpu_that_is_not_there_is_one_line(
    capsys: pytest.CaptureFixture[str], model_folder: Path, options: list[str]
) -> None:
    status = main(["serve", str(model_folder), "--port", "0", "--gpu-memory-utilization", "0.9", *options])

    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert (
        "gpu_memory_utilization 0.9: there is no GPU; set device.capacity instead, for example --device-memory 2GiB"
        in err
    )
    assert err.splitlines()[-1].startswith("kvtier: gpu_memory_utilization")


def test_it_names_settings_that_do_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, no_weights: Path
) -> None:
    config = """
metrics_host = "0.0.0.0"
[device]
retention_tokens = 0
[host]
capacity = 0
[scheduler]
token_budget = 32
max_running = 48
prefill_chunk = 64
by_layers = false
look_ahead = 0
look_ahead_s = 5
[server]
metrics_tenants = ["ops"]
max_queued = 5000
[tenants.secret-salt]
host = "1GiB"
"""
    status, out, _ = check(capsys, tmp_path, no_weights, config)

    dead = out.partition("has no effect:")[2]
    named = {line.partition(":")[0].strip() for line in dead.splitlines() if line.strip()}
    assert status == 0
    assert named == {
        "device.retention_tokens",
        "scheduler.prefill_chunk",
        "scheduler.max_running",
        "scheduler.by_layers",
        "scheduler.look_ahead",
        "scheduler.look_ahead_s",
        "metrics_host",
        "server.max_queued",
        "server.metrics_tenants",
        "tenants.....host",
    }
    assert "secret-salt" not in out


def test_a_size_beside_a_part_of_the_gpu_does_nothing() -> None:
    config = as_config({"device": {"capacity": "8MiB", "gpu_memory_utilization": 0.5}})

    assert settings_without_effect(config, [], None) == ["device.capacity: gpu_memory_utilization takes its place"]


def test_what_is_left_at_its_default_is_not_called_dead(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, no_weights: Path
) -> None:
    _, out, _ = check(capsys, tmp_path, no_weights, "[scheduler]\ntoken_budget = 16\nmax_waiting = 20\n")

    assert "has no effect" not in out


def test_it_says_which_tenants_quotas_are_nobodys(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, no_weights: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys]\n"sk-12345678" = "ann"\n')
    config = '[tenants.ann]\nhost = "1GiB"\n[tenants.eve]\nhost = "1GiB"\nname = "eve"\n'

    _, out, _ = check(capsys, tmp_path, no_weights, config, "--api-keys", str(keys))

    assert "tenants.eve: this tenant has no key" in out
    assert "tenants.ann" not in out


def test_it_says_where_documents_are_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path, no_weights: Path) -> None:
    _, without_disk, _ = check(capsys, tmp_path, no_weights, "")
    _, with_disk, _ = check(capsys, tmp_path, no_weights, f'[disk]\npath = "{tmp_path}/store"\n')
    _, elsewhere, _ = check(capsys, tmp_path, no_weights, f'[documents]\npath = "{tmp_path}/texts"\n')

    assert "documents  end with the process" in without_disk
    assert f"documents  are kept in {tmp_path}/store-documents" in with_disk
    assert f"documents  are kept in {tmp_path}/texts" in elsewhere
    assert "refused" not in with_disk + elsewhere
    assert not (tmp_path / "store").exists()


def test_with_a_sidecar_it_says_who_has_the_tiers_and_what_becomes_of_documents(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, no_weights: Path
) -> None:
    config = "[scheduler]\nby_layers = false\nlook_ahead = 0\n"

    status, out, _ = check(capsys, tmp_path, no_weights, config, "--sidecar", "unix:///run/kvtier.sock")

    assert status == 0
    assert "sidecar    unix:///run/kvtier.sock has the tiers below the device\n" in out
    assert "documents  end with the process; to keep them, set documents.path\n" in out
    assert "\nhost" not in out
    assert "has no effect" not in out


def test_the_option_sidecar_takes_the_place_of_the_configuration_s(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, no_weights: Path
) -> None:
    _, out, _ = check(capsys, tmp_path, no_weights, 'sidecar = "unix:///a"', "--sidecar", "unix:///b")

    assert "sidecar    unix:///b has" in out


def test_a_sidecar_beside_a_disk_is_one_line_and_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, no_weights: Path
) -> None:
    config = f'[disk]\npath = "{tmp_path}/store"\n'

    status, _, err = check(capsys, tmp_path, no_weights, config, "--sidecar", "unix:///run/kvtier.sock")

    assert status == 2
    assert "sidecar: the sidecar provides the disk; remove [disk], or remove the key sidecar to use your own" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("key", ["disk", "documents"])
def test_a_folder_that_is_a_file_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, no_weights: Path, key: str
) -> None:
    (tmp_path / "file").touch()

    status, out, _ = check(capsys, tmp_path, no_weights, f'[{key}]\npath = "{tmp_path}/file/below"\n')

    assert status == 2
    assert f"{key}.path: {tmp_path}/file is not a folder" in out.partition("refused:")[2]


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ('[device]\ncapacity = "16KiB"\n', "device.capacity: holds 0 blocks; use 65536 bytes or more"),
        ('[host]\ncapacity = "16KiB"\n', "host.capacity: holds 0 blocks; use 32768 bytes or more"),
        ('[disk]\npath = "/tmp/none"\ncapacity = "1MiB"\n', "disk.capacity: holds 0 blocks; use"),
        ("[device]\nretention_tokens = 64\n", "device.retention_tokens: an interval of 64 tokens has no effect"),
        ('[request_log]\npath = "/nowhere/log"\n', "request log: there is no folder /nowhere; make it, or give"),
    ],
)
def test_what_would_not_start_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, no_weights: Path, config: str, what: str
) -> None:
    status, out, _ = check(capsys, tmp_path, no_weights, config)

    assert status == 2
    assert what in out.partition("refused:")[2]


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ("[server]\nmax_quued = 3\n", "$.server.max_quued: unknown key; did you mean max_queued?"),
        ('[server]\ntenant_isolation = "loose"\n', "use one of off, strict"),
        ("[server]\nport = 70000\n", "$.server.port"),
    ],
)
def test_dead_keys_and_values_are_one_line_and_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, no_weights: Path, config: str, what: str
) -> None:
    status, _, err = check(capsys, tmp_path, no_weights, config)

    assert status == 2
    assert what in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", [*MODELS, *MORE_MODELS])
def test_the_plan_agrees_with_what_the_engine_finds(tmp_path: Path, name: str) -> None:

    model, folder = build(name), tmp_path / "model"
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    config = as_config({"device": {"capacity": 40 * BLOCK_BYTES, "block_size": 16}, "host": {"capacity": "1MiB"}})

    plan = make_plan(str(folder), config, None)

    with build_core(model, byte_tokenizer(), config) as core:
        assert plan.longest_request == core.longest_request
        assert plan.tiers[0].num_blocks == core.cache.free_slots()[0]
        assert plan.block_bytes == BLOCK_BYTES


@pytest.mark.parametrize("family", ["FalconH1", "Mamba2"])
def test_the_plan_agrees_on_how_many_states_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, family: str
) -> None:
    model, folder = build_states(family), tmp_path / "model"
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    tables = {"device": {"capacity": 4 << 20, "block_size": 16}, "host": {"capacity": 8 << 20}}
    config = as_config(tables)

    plan = make_plan(str(folder), config, None)
    _, out, _ = check(capsys, tmp_path, folder, "[device]\nblock_size = 16\nretention_tokens = 40\n")

    with build_core(model, byte_tokenizer(), config) as core:
        assert plan.longest_request == core.longest_request
        assert [tier.num_states for tier in plan.tiers] == [
            core.cache.free_slots()[-1],
            core.cache.lower.status.num_slots[-1],
        ]
        assert plan.state_bytes == core.runner.block_bytes[-1]
    assert plan.state_interval == 512
    assert f"states     {plan.state_bytes:,} bytes each; kept every 40 tokens" in out
    assert "device.retention_tokens: an interval of 40 tokens is not a multiple of 16" in out
