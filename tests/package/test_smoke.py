"""The wheel in environments of its own, far from the repository, with one extra each: its commands work there.

`make smoke` runs this. What an environment has is what `pip install '.[extra]'` installs, so that a package that
kvtier imports and does not require is missing, as it is on a user's machine.
"""

import json
import os
import re
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from extra_environments import BASE, FOLDER, LEFT_OUT, PROJECT, TRIED, make_venv, pip, sites_of
from fake_completions import fake_server
from gguf_files import write_gguf
from lora_adapters import ADAPTERS, save_adapter
from package_builds import ROOT, build, copy_of_tree
from redis_servers import SERVER, RedisServer
from serving import chat_tokenizer
from small_models import build as build_model
from vision_models import build_vision
from waiting import wait_for

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (FOLDER / "installed").exists(), reason="needs environments: make .venv/extras/installed"),
]

CLEAN = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))},
    "HF_HUB_OFFLINE": "1",
}
DEADLINE_S = 600.0  # a start takes a minute where other processes keep all cores busy
CONFIG: dict[str, Any] = {"device": {"capacity": "8MiB", "block_size": 16}, "host": {"capacity": "8MiB"}}
# Arguments: a model, a configuration, and what else to ask with. Prints how many tokens were generated.
ASK = """
import json, sys
from kvtier import LLM, SamplingParams, StructuredOutputs
model, config, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
more = {"structured_outputs": StructuredOutputs(json_object=True)} if "structured" in options else {}
sampling = SamplingParams(max_tokens=4, **more)
with LLM(model, config) as llm:
    (done,) = llm.generate(["Hello, hello, hello, hello, hello!"], sampling, lora=options.get("lora"))
print(len(done.token_ids))
"""
# Arguments: pairs of a model and a configuration. Prints why each cannot be used.
REFUSALS = """
import json, sys
from kvtier import LLM, SamplingParams, StructuredOutputs
sampling = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputs(json_object=True))
for model, config in json.loads(sys.argv[1]):
    try:
        with LLM(model, config) as llm:
            llm.generate(["Hello"], sampling)
        print("it works")
    except (ImportError, ValueError) as error:
        print(error)
"""
# Arguments: a model that sees images, and a configuration. Prints how many tokens were generated, or why not.
SEE = """
import json, sys
from kvtier import LLM, ImagePrompt, SamplingParams
with LLM(sys.argv[1], json.loads(sys.argv[2])) as llm:
    try:
        from PIL import Image
        images = [Image.new("RGB", (40, 30), "red")]
    except ImportError:
        images = ["an image that pillow would have opened"]
    try:
        (done,) = llm.generate(ImagePrompt("<image>?", images), SamplingParams(max_tokens=4))
        print(len(done.token_ids))
    except ValueError as error:
        print(error)
"""
EVERY_NAME = "import kvtier; print([getattr(kvtier, name) is not None for name in kvtier.__all__])"
FIGURES = {"rows": [{"name": "16 KiB up: plain pinned copy", "unit": "GB/s", "value": 1.0}]}
RAY_APP = """
import json, sys
from kvtier.routing.ray_serve.app import build_app
print(build_app(json.loads(sys.argv[1])))
"""


@dataclass(frozen=True)
class Installed:
    """An environment with kvtier's wheel, and a folder to work in."""

    python: Path
    folder: Path

    def run(self, *command: Path | str, status: int = 0, cwd: Path | None = None) -> str:
        """Run a command, the first word of which is in the environment, and return what it prints."""
        arguments = [self.python.parent / command[0], *command[1:]]
        done = subprocess.run(arguments, cwd=cwd or self.folder, env=CLEAN, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout if status == 0 else done.stderr

    def ask(self, model: Path, config: Mapping[str, Any], **options: Any) -> str:
        """Ask the *model* a question through the library, and return what `ASK` prints."""
        arguments = [json.dumps({**CONFIG, **config}), json.dumps(options)]
        return self.run("python", "-c", ASK, model, *arguments)

    @contextmanager
    def running(self, *command: Path | str, url: str) -> Iterator[None]:
        """Run a server until the block ends; it is there once *url* answers, and ends well when it is told to."""
        log = self.folder / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [self.python.parent / command[0], *command[1:]], cwd=self.folder, env=CLEAN, stdout=file, stderr=file
            )
        try:
            wait_for(lambda: process.poll() is not None or answers(url), pause_s=0.1, deadline_s=DEADLINE_S)
            assert process.poll() is None, log.read_text()
            yield
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url):
            return True
    except OSError:
        return False


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    return build("wheel", copy_of_tree(folder), folder / "wheel")


Install = Callable[..., Installed]


@pytest.fixture
def install(wheel: Path, tmp_path: Path) -> Install:
    """A function that installs the wheel with some extras, as pip does from what their environments have."""

    def installed(*extras: str) -> Installed:
        python = make_venv(tmp_path / "venv", sites_of(extras))
        # Nothing is downloaded: what is missing in the environments is an error of pip's.
        named = f"{wheel}[{','.join(extras)}]" if extras else wheel
        pip(python, "install", "-q", "--no-index", "--no-compile", named)
        (tmp_path / "work").mkdir()
        return Installed(python, tmp_path / "work")

    return installed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model."""
    folder = tmp_path_factory.mktemp("models") / "small"
    build_model("llama").save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def test_each_extra_has_a_test_here_or_a_reason() -> None:
    assert sorted(TRIED) == sorted(COMMANDS)
    assert set(LEFT_OUT) <= set(PROJECT["optional-dependencies"])
    assert {BASE} & set(PROJECT["optional-dependencies"]) == set()


def test_the_wheel_is_what_is_imported(install: Install) -> None:
    environment = install()
    script = "import kvtier, kvtier.engine.config as config; print(kvtier.__file__); print(config.__file__)"

    files = environment.run("python", "-c", script).split()

    assert [Path(file).is_relative_to(environment.python.parents[1]) for file in files] == [True, True]
    assert not any(Path(file).is_relative_to(ROOT) for file in files)


def test_without_extras_the_library_is_there_and_finds_its_configurations(install: Install) -> None:
    environment = install()
    script = "from kvtier import load_config; print(load_config('laptop').disk.codec)"

    assert environment.run("kvtier", "--version") == f"kvtier {version('kvtier')}\n"
    assert environment.run("python", "-c", script) == "zstd\n"
    assert set(json.loads(environment.run("python", "-c", EVERY_NAME).lower())) == {True}


def test_without_extras_the_demo_has_right_answers_from_each_tier(install: Install) -> None:
    shown = json.loads(install().run("kvtier", "demo", "--tokens", "1000", "--json"))

    steps = {step["name"]: step for step in shown["steps"]}
    assert list(steps) == ["cold", "device", "host", "disk", "restart", "corrupt"]
    assert all(step["answers_correct"] == step["questions"] > 0 for step in steps.values())
    assert all(steps[tier]["tokens"][tier] > 0 for tier in ("device", "host", "disk"))
    assert steps["restart"]["tokens"]["disk"] > 0
    assert steps["corrupt"]["corrupt_blocks"] == 1


def test_without_extras_each_command_says_which_one_it_needs(install: Install, model: Path) -> None:
    environment = install()
    port = str(unused_port())
    sidecar = ["sidecar", "--host", "64MiB", "--http-port", port, "--listen", f"tcp://127.0.0.1:{unused_port()}"]
    commands: dict[str, Sequence[Path | str]] = {
        "serve": ["serve", model, "--port", port],
        "sidecar": [*sidecar, "--socket", "none"],
        "route": ["route", "http://127.0.0.1:1", "--port", port],
        "prove": ["prove", "http://127.0.0.1:1"],
        "redis": ["bench-remote", "redis://127.0.0.1:1"],
        "object": ["bench-remote", "s3://bucket/blocks"],
    }

    for extra, command in commands.items():
        told = environment.run("kvtier", *command, status=2).splitlines()[-1]

        assert re.fullmatch(rf"kvtier: .+ needs \w+; pip install 'kvtier\[{extra}\]'(, or .+)?", told), told


def test_without_extras_each_setting_says_which_one_it_needs(install: Install, model: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(range(32)))
    (tmp_path / "key").chmod(0o600)
    write_gguf(tmp_path / "small.gguf")
    disk = {"path": str(tmp_path / "store"), "capacity": "64MiB", "encryption_key_file": str(tmp_path / "key")}
    asked: list[tuple[str, Path, dict[str, object]]] = [
        ("redis", model, {"remote": {"url": "redis://127.0.0.1:1"}}),
        ("object", model, {"remote": {"url": f"file://{tmp_path}/remote"}}),
        ("crypto", model, {"disk": disk}),
        ("events", model, {"events": {}}),
        ("otel", model, {"tracing": {"endpoint": "http://127.0.0.1:1"}}),
        ("lora", model, {"lora": {"small": {"path": str(tmp_path)}}}),
        ("structured", model, {}),
        ("real", tmp_path / "small.gguf", {}),
    ]

    script = json.dumps([(str(path), {**CONFIG, **config}) for _, path, config in asked])
    told = install().run("python", "-c", REFUSALS, script).splitlines()

    assert len(told) == len(asked)
    for (extra, _, _), line in zip(asked, told, strict=True):
        assert re.fullmatch(rf".+ needs [\w ]+; pip install 'kvtier\[{extra}\]'(, or .+)?", line), line


def test_without_extras_an_image_says_which_one_it_needs(install: Install) -> None:
    environment = install()

    told = see(environment)

    assert told == "an image in a prompt needs PIL; pip install 'kvtier[images]'\n"


def test_what_a_message_says_to_install_can_be_installed(install: Install) -> None:
    """pip takes the requirements of an extra from kvtier as it is installed, and asks no index for kvtier."""
    environment = install()
    with pytest.raises(subprocess.CalledProcessError):  # no redis is to be had, but kvtier is
        pip(environment.python, "install", "-q", "--no-index", "kvtier[redis]")

    (site,) = (environment.python.parents[1] / "lib").glob("python*/site-packages")
    with (site / "seen.pth").open("a") as file:
        file.write(f"{sites_of(['redis'])[0]}\n")
    pip(environment.python, "install", "-q", "--no-index", "kvtier[redis]")


def test_the_readmes_first_installation_serves_a_gguf_file(install: Install, tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf")

    serve(install("serve", "real"), tmp_path / "small.gguf")


def serve(environment: Installed, model: Path) -> None:
    port = unused_port()
    url = f"http://127.0.0.1:{port}"
    options = ["--host-memory", "8MiB", "--device-memory", "8MiB", "--port", str(port)]
    question = {"model": model.stem, "prompt": "Hello", "max_tokens": 3}
    with environment.running("kvtier", "serve", model, *options, url=f"{url}/ready"):
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3


def run_sidecar(environment: Installed, model: Path) -> None:
    port = unused_port()
    url = f"http://127.0.0.1:{port}"
    options = ["--host", "64MiB", "--http-port", str(port), "--listen", f"tcp://127.0.0.1:{unused_port()}"]
    with environment.running("kvtier", "sidecar", *options, "--socket", "none", url=f"{url}/health"):
        assert "host" in environment.run("kvtier", "top", url, "--once")


def run_route(environment: Installed, model: Path) -> None:
    port = unused_port()
    url = f"http://127.0.0.1:{port}/health"
    with environment.running("kvtier", "route", "http://127.0.0.1:1", "--port", str(port), url=url):
        pass


def prove(environment: Installed, model: Path) -> None:
    with fake_server() as server:
        few = ["--lengths", "200", "--rounds", "2", "--seed", "3"]
        assert "\nproven, " in environment.run("kvtier", "prove", f"{server.url}/v1", *few)


def use_redis(environment: Installed, model: Path) -> None:
    if SERVER is None:
        pytest.skip("needs redis-server or valkey-server")
    server = RedisServer(environment.folder / "redis")
    try:
        url = f"redis://{server.address}"
        environment.run("kvtier", "bench-remote", url, "--block", "64KiB", "--blocks", "8")
        assert environment.ask(model, {"remote": {"url": url}}) == "4\n"
    finally:
        server.close()


def use_object_store(environment: Installed, model: Path) -> None:
    url = f"file://{environment.folder}/remote"
    environment.run("kvtier", "bench-remote", url, "--block", "64KiB", "--blocks", "8")
    assert environment.ask(model, {"remote": {"url": url}}) == "4\n"


def encrypt(environment: Installed, model: Path) -> None:
    key, store = environment.folder / "key", environment.folder / "store"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    disk = {"path": str(store), "capacity": "64MiB", "encryption_key_file": str(key)}
    assert environment.ask(model, {"disk": disk}) == "4\n"
    assert "records verified" in environment.run("kvtier", "check", store, "--key-file", key)


def read_gguf(environment: Installed, model: Path) -> None:
    write_gguf(environment.folder / "small.gguf")
    assert environment.ask(environment.folder / "small.gguf", {}) == "4\n"


def use_adapter(environment: Installed, model: Path) -> None:
    adapter = save_adapter(build_model("llama"), environment.folder / "adapter", **ADAPTERS["all"])
    assert environment.ask(model, {"lora": {"mine": {"path": str(adapter)}}}, lora="mine") == "4\n"


def see(environment: Installed) -> str:
    for part in build_vision("smolvlm").parts():
        part.save_pretrained(environment.folder / "seeing")
    return environment.run("python", "-c", SEE, environment.folder / "seeing", json.dumps(CONFIG))


def see_an_image(environment: Installed, model: Path) -> None:
    assert see(environment) == "4\n"


def publish_events(environment: Installed, model: Path) -> None:
    events = {"endpoint": f"ipc://{environment.folder}/events"}
    assert environment.ask(model, {"events": events}) == "4\n"


def trace(environment: Installed, model: Path) -> None:
    assert environment.ask(model, {"tracing": {"endpoint": "http://127.0.0.1:1"}}) == "4\n"


def force_json(environment: Installed, model: Path) -> None:
    assert 2 <= int(environment.ask(model, {}, structured=True)) <= 4  # "{}" or the beginning of an object


def build_ray_application(environment: Installed, model: Path) -> None:
    assert "Application" in environment.run("python", "-c", RAY_APP, json.dumps({"model": str(model)}))


def draw_figures(environment: Installed, model: Path) -> None:
    (environment.folder / "gpu_copies.json").write_text(json.dumps(FIGURES))
    assert "copies.png" in environment.run("python", "-m", "bench.gpu_plots", environment.folder, cwd=ROOT)


def start_examples(environment: Installed, model: Path) -> None:
    for example in sorted((ROOT / "examples").glob("*.py")):
        if "__main__" in example.read_text() and example.stem != "ray_serve":
            assert "usage: " in environment.run("python", example, "--help")


# What is done in the environment of each extra: its main command, or the setting that needs it.
COMMANDS: dict[str, Callable[[Installed, Path], None]] = {
    "bench": draw_figures,
    "crypto": encrypt,
    "events": publish_events,
    "examples": start_examples,
    "images": see_an_image,
    "lora": use_adapter,
    "object": use_object_store,
    "otel": trace,
    "prove": prove,
    "ray": build_ray_application,
    "real": read_gguf,
    "redis": use_redis,
    "route": run_route,
    "serve": serve,
    "sidecar": run_sidecar,
    "structured": force_json,
}


@pytest.mark.parametrize("extra", COMMANDS)
def test_an_extra_alone_has_all_that_its_command_needs(extra: str, install: Install, model: Path) -> None:
    COMMANDS[extra](install(extra), model)
