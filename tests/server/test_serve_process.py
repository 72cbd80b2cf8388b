"""`kvtier serve` as a process: its signals, its log, its exit status, and what the next process finds."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest
from served_config import configured
from serving import DEADLINE_S, MODEL, Address, ServerProcess, come_true, serving_process

KEY = "sk-ann-very-secret"


def is_draining(server: ServerProcess) -> bool:
    return server.get("/ready").json()["status"] == "draining"


@pytest.mark.long
def test_sigterm_lets_streams_finish_and_keeps_what_is_cached(tmp_path: Path, model_folder: Path) -> None:
    prompt = "The quick brown fox. " * 10
    with serving_process(tmp_path, model_folder, configured(tmp_path)) as server:
        with server.streaming(prompt, max_tokens=400) as stream:
            texts = [next(stream)["choices"][0]["text"]]
            server.signal()
            come_true(lambda: is_draining(server))
            refused = server.post("/v1/completions", json={"model": MODEL, "prompt": "Hello"})
            texts += [event["choices"][0]["text"] for event in stream]  # to its [DONE]

        assert server.wait() == 0
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert len(texts) > 100

    with serving_process(tmp_path, model_folder, configured(tmp_path)) as server:
        tokens = server.complete(prompt, max_tokens=2)["kvtier"]["tokens"]
        server.signal(signal.SIGINT)

        assert tokens["disk"] == len(prompt) // 16 * 16
        assert server.wait() == 0


@pytest.mark.long
def test_a_gguf_file_is_served_and_the_log_has_only_lines(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="GGUF files need kvtier[real]")
    from gguf_files import write_gguf

    file = tmp_path / "small.gguf"
    write_gguf(file)

    with serving_process(tmp_path, file, configured(tmp_path)) as server:
        answer = server.complete("Hello", max_tokens=3)

        assert answer["usage"]["completion_tokens"] == 3
        assert all(json.loads(line) for line in server.log.read_text().splitlines())


@pytest.mark.long
def test_a_second_signal_ends_at_once(tmp_path: Path, model_folder: Path) -> None:
    with (
        serving_process(tmp_path, model_folder, configured(tmp_path)) as server,
        server.streaming("Hello", max_tokens=4000) as stream,
    ):
        next(stream)
        server.signal()
        come_true(lambda: is_draining(server))
        server.signal()

        assert server.wait() == 128 + signal.SIGTERM
        with pytest.raises(httpx.RemoteProtocolError):
            list(stream)


@pytest.mark.long
def test_the_log_has_ids_and_tokens_but_neither_prompts_nor_keys(tmp_path: Path, model_folder: Path) -> None:
    keys, marker = tmp_path / "keys.toml", "confidential-marker"
    keys.write_text(f'[keys]\n"{KEY}" = "ann"\n')
    keys.chmod(0o600)
    chat = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": marker}], "user": marker}
    mistakes: list[dict[str, object]] = [
        {"content": f'{{"prompt": "{marker}'.encode()},
        {"json": {"model": MODEL, "prompt": marker, "max_tokens": marker}},
        {"json": {"model": marker, "prompt": marker}},
        {"json": {"model": MODEL, "prompt": marker * 1000}},
        {"json": {"model": MODEL, "prompt": marker, marker: marker}},
    ]
    authorized = {"Authorization": f"Bearer {KEY}", "x-request-id": "req-42"}
    with serving_process(tmp_path, model_folder, configured(tmp_path), "--api-keys", keys) as server:
        server.complete(marker * 4, KEY, max_tokens=5, cache_salt=marker)
        server.complete(marker * 4, KEY, max_tokens=5, cache_salt=marker)
        with server.streaming(marker, KEY, max_tokens=4000) as stream:
            next(stream)  # and leave
        statuses = [server.post("/v1/chat/completions", json=chat, headers=authorized).status_code]
        for mistake in mistakes:
            statuses.append(server.post("/v1/completions", headers=authorized, **mistake).status_code)
        refused = server.get(f"/{marker}?q={marker}", headers={"Authorization": f"Bearer {marker}"})
        server.get(f"/{marker}", headers=authorized)
        come_true(lambda: any(line.get("status") == 499 for line in server.lines()))
        server.signal()
        server.wait()

        text, lines = server.log.read_text(), server.lines()

    assert (statuses, refused.status_code) == ([200, 400, 400, 404, 400, 400], 401)
    assert marker not in text
    assert KEY not in text
    assert not re.search(r"Traceback|WARNING", text)
    requests = [line for line in lines if line["message"] == "request"]
    assert Counter(line["status"] for line in requests) == {200: 3, 400: 4, 404: 2, 401: 1, 499: 1}
    second = requests[1]
    assert second["tenant"] == "ann"
    assert second["prompt_tokens"] == len(marker) * 4 == second["device"] + second["recomputed"]
    assert {"duration_s", "ttft_s", "generated", "host", "disk", "request_id"} <= second.keys()
    assert any(line.get("request_id") == "req-42" for line in requests)
    assert [line["host"] for line in lines if line["message"] == "listening"] == ["127.0.0.1"]
    stages = [line["message"] for line in lines if line["message"].startswith("load: ")]
    assert [word for word in ("weights", "memory", "store") if any(word in stage for stage in stages)] == [
        "weights",
        "memory",
        "store",
    ]
    assert len(text.splitlines()) == len(lines)  # every line is an object


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--api-keys", "/nowhere/keys"], "/nowhere/keys: No such file"),
        (["--tenant-isolation", "strict"], "--api-keys"),
        (["--port", "99999"], "port"),
        (["--host", "203.0.113.7"], "choose another --host or --port"),
        (["--host", "no such host"], "choose another --host or --port"),
        (["--config", ""], "an empty name: no such file, and no shipped configuration has this name"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_2(model_folder: Path, arguments: list[str], what: str) -> None:
    command = [sys.executable, "-m", "kvtier.cli.main", "serve", "--model", str(model_folder), "--port", "0"]

    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=DEADLINE_S * 2, check=False)

    *_, last = done.stderr.splitlines()
    assert done.returncode == 2
    assert last.startswith("kvtier: ")
    assert what in last
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "kvtier.cli.main", "serve", "--model", str(model_folder)]

        done = subprocess.run(
            [*command, "--port", str(port)], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )

    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "load:" not in done.stderr


@pytest.mark.long
def test_a_second_server_on_the_same_documents_is_one_line_that_names_the_first(
    tmp_path: Path, model_folder: Path
) -> None:
    with serving_process(tmp_path, model_folder, configured(tmp_path)) as server:
        command = [
            sys.executable,
            "-m",
            "kvtier.cli.main",
            "serve",
            "--model",
            str(model_folder),
            "--port",
            "0",
        ]

        done = subprocess.run(
            [*command, "--config", str(tmp_path / "kvtier.toml")],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    *_, last = done.stderr.splitlines()
    assert done.returncode == 2
    what = f"folder {tmp_path / 'store-documents'} is open in process {server.process.pid}"
    assert last == f"kvtier: {what}; stop it, or give this one a folder of its own"
    assert "Traceback" not in done.stderr


def test_it_answers_while_libraries_are_imported_and_a_signal_ends_it(tmp_path: Path, model_folder: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "kvtier.cli.main", "serve", "--model", str(model_folder), "--port", "0"]
    with (
        log.open("w") as output,
        subprocess.Popen([*command, "--log-format", "json"], stdout=output, stderr=output) as process,
    ):
        try:
            come_true(lambda: '"port": ' in log.read_text())
            address = Address(json.loads(log.read_text().splitlines()[0])["port"])
            answers = [address.get(path) for path in ("/health", "/ready")]  # before torch is there, never mind a model
            process.send_signal(signal.SIGTERM)

            assert process.wait(DEADLINE_S) == 0
            assert [answer.status_code for answer in answers] == [200, 503]
            assert answers[1].json() == {"status": "loading", "stage": "importing torch and transformers"}
        finally:
            process.kill()


@pytest.mark.long
def test_sighup_reads_the_keys_again_and_a_broken_file_keeps_the_old_ones(tmp_path: Path, model_folder: Path) -> None:
    def write(content: str) -> None:
        new = tmp_path / "keys.new"
        new.write_text(content)
        new.chmod(0o600)
        new.replace(tmp_path / "keys.toml")

    def status(key: str) -> int:
        return server.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

    def told(what: str) -> list[dict]:
        return [line for line in server.lines() if what in line["message"]]

    first, second = "sk-first-secret", "sk-second-secret"
    write(f'[keys]\n"{first}" = "ann"\n')
    config = configured(tmp_path)
    with serving_process(tmp_path, model_folder, config, "--api-keys", tmp_path / "keys.toml") as server:
        assert [status(first), status(second)] == [200, 401]
        write(f'[keys]\n"{second}" = "ann"\n"sk-third-secret" = "bob"\n')
        server.signal(signal.SIGHUP)
        come_true(lambda: status(second) == 200)
        assert status(first) == 401
        assert server.complete("Hello", second)["choices"]

        write(f'[keys\n"{first}" = "ann"\n')
        server.signal(signal.SIGHUP)
        come_true(lambda: told("API keys are unchanged"))

        assert [status(first), status(second)] == [401, 200]
        assert [line["level"] for line in told("API keys are unchanged")] == ["error"]
        reloaded = "SIGHUP: reloaded the API keys of 2 tenants"
        assert [line["message"] for line in told("keys of 2 tenants")] == [reloaded]
        assert "secret" not in server.log.read_text()
        server.signal()
        assert server.wait() == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["human", "json"])
def test_what_libraries_warn_of_stands_in_the_log_as_lines_of_its_own(kind: str) -> None:
    script = f"""
import warnings
from kvtier.web.log_lines import redirect_libraries, write_log
write_log({kind!r})
import huggingface_hub.utils.logging, torch, transformers.utils.logging
redirect_libraries()
warnings.warn("of the warnings module")
transformers.utils.logging.get_logger("transformers.models").warning("of transformers,\\nin two lines")
huggingface_hub.utils.logging.get_logger("huggingface_hub.file_download").warning("of the hub")
__import__("logging").getLogger("uvicorn.error").warning("of uvicorn")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S * 2, check=True
    )

    lines = done.stderr.splitlines()
    whats = ["of the warnings module", "of transformers, in two lines", "of the hub", "of uvicorn"]
    assert len(lines) == len(whats), done.stderr
    assert all(what in line for what, line in zip(whats, lines, strict=True))
    if kind == "json":
        objects = [json.loads(line) for line in lines]
        assert {each["level"] for each in objects} == {"warning"}
        assert [each["logger"].partition(".")[0] for each in objects] == [
            "py",
            "transformers",
            "huggingface_hub",
            "uvicorn",
        ]
    else:
        assert all(" WARNING " in line for line in lines)
