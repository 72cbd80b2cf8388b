"""Documents over HTTP and with `kvtier doc`."""

import asyncio
import json
import random
import signal
import string
import threading
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
from lora_adapters import save_adapters
from plain_http import NO_TLS
from serving import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    DEADLINE_S,
    MODEL,
    Address,
    ServerInThread,
    come_true,
    serving,
    serving_process,
    tables,
)
from small_models import build, byte_tokenizer, plain_greedy

from kvtier.cli.main import main
from kvtier.server.documents.file import file_name

ANN, BOB = "sk-ann-1111", "sk-bob-2222"
HOST_BLOCKS = 600  # of the half of which each of two tenants may pin a half
CONFIG = """
[device]
capacity = "4MiB"
block_size = 16

[host]
capacity = "8MiB"

[disk]
path = "{folder}/store"
capacity = "64MiB"

[scheduler]
load = "always"
"""


@pytest.fixture(scope="module")
def worker() -> Iterator[ServerInThread]:
    """A server with two tenants."""
    config = {**tables(max_prompt_tokens=3000), "host": {"capacity": HOST_BLOCKS * BLOCK_BYTES}}
    with serving(build("llama"), config, {ANN: "ann", BOB: "bob"}) as address:
        yield address


def text_of(seed: int, num_characters: int = 1000) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(string.ascii_lowercase + " .") for _ in range(num_characters))


def call(server: Address, method: str, path: str, key: str = ANN, **others: object) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.request(
        method, f"{server.url}/v1/kvtier/documents{path}", headers=headers, timeout=DEADLINE_S, verify=NO_TLS, **others
    )


def put(server: Address, document_id: str, key: str = ANN, **body: object) -> dict:
    """Put a document and wait until it is ready; its object."""
    answer = call(server, "PUT", f"/{document_id}", key, json=body)
    assert answer.status_code in (200, 201), answer.text
    come_true(lambda: call(server, "GET", f"/{document_id}", key).json()["status"] == "ready")
    return call(server, "GET", f"/{document_id}", key).json()


def cached(usage: object) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]


def chat(server: Address, content: object, key: str = ANN, **others: object) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 6, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    headers = {"Authorization": f"Bearer {key}"}
    return server.post("/v1/chat/completions", json={**body, **others}, headers=headers)


def test_a_document_is_put_computed_looked_at_and_deleted(worker: ServerInThread) -> None:
    text = text_of(1)

    answer = call(worker, "PUT", "/report.txt", json={"text": text})
    come_true(lambda: call(worker, "GET", "/report.txt").json()["status"] == "ready")
    document = call(worker, "GET", "/report.txt").json()
    again = call(worker, "PUT", "/report.txt", json={"text": text})
    there = call(worker, "GET", "").json()
    gone = call(worker, "DELETE", "/report.txt")

    num_tokens = len(f"<user>{text}\n")
    assert (answer.status_code, again.status_code, gone.status_code) == (201, 200, 200)
    assert answer.json()["status"] in ("queued", "prefilling", "ready")
    assert (document["id"], document["object"], document["as"]) == ("report.txt", "document", "chat")
    assert document["num_tokens"] == document["prefilled_tokens"] == num_tokens == sum(document["tokens"].values())
    assert document["tokens"]["device"] == num_tokens // BLOCK_SIZE * BLOCK_SIZE
    assert document["bytes"]["device"] == document["tokens"]["device"] * 1024
    assert document["load_s"] == 0
    assert document["pin"] is None
    assert text not in answer.text + json.dumps(document)
    assert [it["id"] for it in there["data"]].count("report.txt") == 1, "other tests of this server leave documents"
    assert not there["survive_restarts"]
    assert gone.json() == {"id": "report.txt", "object": "document.deleted", "deleted": True}
    assert call(worker, "GET", "/report.txt").status_code == 404
    assert call(worker, "GET", "").json()["data"] == []


@pytest.mark.parametrize("cache_salt", [None, "pepper"])
def test_a_chat_that_names_a_document_finds_its_tokens_and_answers_as_if_it_had_sent_the_text(
    worker: ServerInThread, cache_salt: str | None
) -> None:
    text = text_of(2)
    document = put(worker, "report", text=text, **({"cache_salt": cache_salt} if cache_salt else {}))
    question = {"type": "text", "text": "Who wrote it?"}

    answer = chat(worker, [{"type": "document", "document_id": "report"}, question]).json()
    sent = chat(worker, [{"type": "text", "text": text}, question], kvtier={"skip_reading_prefix_cache": True}).json()

    assert cached(answer["usage"]) >= document["num_tokens"] - 1
    assert answer["usage"]["prompt_tokens"] == sent["usage"]["prompt_tokens"]
    assert answer["choices"][0]["message"]["content"] == sent["choices"][0]["message"]["content"]
    prompt = byte_tokenizer()(f"<user>{text}\nWho wrote it?\n<assistant>")["input_ids"]
    expected = byte_tokenizer().decode(plain_greedy(build("llama"), prompt, 6))
    assert answer["choices"][0]["message"]["content"] == expected


def test_documents_are_where_they_were_before_too(worker: ServerInThread) -> None:
    document, headers = put(worker, "moved", text=text_of(77)), {"Authorization": f"Bearer {ANN}"}

    before = worker.get("/v1/kvtier/documents/moved", headers=headers).json()
    pinned = worker.post("/v1/kvtier/documents/moved/pin", json={"ttl_s": 60}, headers=headers)
    listed = worker.get("/v1/kvtier/documents", headers=headers).json()

    assert (before["num_tokens"], before["status"], pinned.status_code) == (document["num_tokens"], "ready", 200)
    assert "moved" in [each["id"] for each in listed["data"]]
    assert call(worker, "DELETE", "/moved").json()["deleted"]
    assert worker.get("/v1/kvtier/documents/moved", headers=headers).status_code == 404


def test_the_openai_client_can_name_a_document(worker: ServerInThread) -> None:
    document = put(worker, "report", text=text_of(3), system="Be brief.")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "document", "document_id": "report"}, {"type": "text", "text": "Who?"}]},
    ]

    answer = worker.openai(ANN).chat.completions.create(model=MODEL, max_tokens=2, messages=messages)

    assert answer.usage.prompt_tokens_details.cached_tokens >= document["num_tokens"] - 1


def test_a_completion_goes_on_after_the_document_that_it_names(worker: ServerInThread) -> None:
    tokens = random.Random(4).choices(range(256), k=500)
    put(worker, "ids", token_ids=tokens)
    text = put(worker, "text", text="".join(map(chr, range(97, 123))) * 10, **{"as": "text"})

    after_ids = worker.complete("Who?", ANN, max_tokens=6, kvtier={"document": "ids"})
    after_text = worker.complete(["Who?", "Why?"], ANN, max_tokens=6, kvtier={"document": "text"})

    prompt = [*tokens, *b"Who?"]
    assert cached(after_ids["usage"]) >= 499
    assert after_ids["usage"]["prompt_tokens"] == len(prompt)
    assert cached(after_text["usage"]) >= 2 * (text["num_tokens"] - BLOCK_SIZE)
    assert after_text["usage"]["prompt_tokens"] == 2 * (text["num_tokens"] + 4)


def test_tenants_neither_see_nor_guess_each_other_s_documents(worker: ServerInThread) -> None:
    text = text_of(5)
    put(worker, "secret", ANN, text=text)
    part = [{"type": "document", "document_id": "secret"}, {"type": "text", "text": "?"}]

    there = [call(worker, "GET", "/secret", BOB), call(worker, "DELETE", "/secret", BOB)]
    there += [call(worker, "POST", path, BOB, json={"ttl_s": 5}) for path in ("/secret/warm", "/secret/pin")]
    there += [chat(worker, part, BOB)]
    nowhere = [call(worker, "GET", "/nothing", BOB), call(worker, "DELETE", "/nothing", BOB)]
    nowhere += [call(worker, "POST", path, BOB, json={"ttl_s": 5}) for path in ("/nothing/warm", "/nothing/pin")]
    nowhere += [chat(worker, [{"type": "document", "document_id": "nothing"}], BOB)]

    assert [answer.status_code for answer in there] == [404] * 5
    assert [answer.json() for answer in there] == [answer.json() for answer in nowhere]
    assert call(worker, "GET", "", BOB).json()["data"] == []
    own = put(worker, "secret", BOB, text=text)  # the same id, and the same text
    assert own["status"] == "ready"
    assert cached(chat(worker, part, BOB).json()["usage"]) >= own["num_tokens"] - 1
    call(worker, "DELETE", "/secret", BOB)
    assert call(worker, "GET", "/secret", ANN).status_code == 200


def test_a_pin_holds_until_it_is_ended_and_what_does_not_fit_is_refused(worker: ServerInThread) -> None:
    put(worker, "first", text=text_of(6, 2000))
    put(worker, "second", text=text_of(7, 2000))

    pinned = call(worker, "POST", "/first/pin", json={"ttl_s": 3600})
    refused = call(worker, "POST", "/second/pin", json={"ttl_s": 3600})
    come_true(lambda: call(worker, "GET", "/first").json()["pin"]["is_held"])
    unpinned = call(worker, "DELETE", "/first/pin")
    second = call(worker, "POST", "/second/warm?tier=host")

    assert 3590 < pinned.json()["pin"]["ttl_s"] <= 3600
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "host_memory_full")
    assert "unpin another" in refused.json()["error"]["message"]
    assert unpinned.json()["pin"] is None
    assert second.status_code == 202
    come_true(lambda: not call(worker, "GET", "/second").json()["is_warming"])
    assert call(worker, "POST", "/second/warm?tier=device").status_code == 202
    worker.ask(lambda core: core.cache.check())


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "what"),
    [
        ("PUT", "/a", {}, 400, "text: give either text or token_ids"),
        ("PUT", "/a", {"text": "a", "token_ids": [1]}, 400, "text: give either text or token_ids"),
        ("PUT", "/a", {"text": ""}, 400, "text"),
        ("PUT", "/a", {"token_ids": [-1]}, 400, "token_ids[0]"),
        ("PUT", "/a", {"token_ids": [1 << 31]}, 400, "token_ids[0]"),
        ("PUT", "/a", {"token_ids": [1, 256]}, 400, "token id 256: the tokenizer has 0 to 255"),
        ("PUT", "/a", {"text": "a" * 100_000}, 400, "or more; shorten it to 3000"),
        ("PUT", "/a", {"text": "a" * 100_000, "as": "text"}, 400, "or more; shorten it to 3000"),
        ("PUT", "/a", {"token_ids": []}, 400, "the document has 0 tokens"),
        ("PUT", "/a", {"token_ids": [1], "as": "chat"}, 400, "as: token ids"),
        ("PUT", "/a", {"text": "a", "as": "song"}, 400, "as"),
        ("PUT", "/a", {"text": "a", "colour": 1}, 400, "colour: unknown parameter"),
        ("PUT", "/a", {"text": "a", "model": "other"}, 404, "no model of that name"),
        ("PUT", "/a", {"text": "a" * 3001}, 400, "shorten it to 3000"),
        ("PUT", "/a%20b", {"text": "a"}, 400, "1 to 128 of the characters"),
        ("PUT", "/" + "a" * 129, {"text": "a"}, 400, "1 to 128 of the characters"),
        ("POST", "/there/warm?tier=disk", None, 400, "tier: must be host or device"),
        ("POST", "/there/pin", {}, 400, "ttl_s: is missing"),
        ("POST", "/there/pin", {"ttl_s": 0}, 400, "ttl_s"),
        ("POST", "/there/eat", None, 404, "no such route"),
        ("DELETE", "/there/warm", None, 404, "no such route"),
        ("GET", "/nothing", None, 404, "no document with this id"),
        ("POST", "/there", None, 405, "Method Not Allowed"),
    ],
)
def test_what_is_wrong_is_told_in_openais_shape(
    worker: ServerInThread, method: str, path: str, body: object, status: int, what: str
) -> None:
    call(worker, "PUT", "/there", json={"text": "some"})

    answer = call(worker, method, path, json=body)

    assert answer.status_code == status, answer.text
    assert what in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "change", "status", "param"),
    [
        ("/v1/completions", {"prompt": "a", "kvtier": {"document": "nothing"}}, 404, "kvtier.document"),
        ("/v1/completions", {"prompt": "a", "kvtier": {"document": "as-chat"}}, 400, "kvtier.document"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "kvtier": {"document": "a"}}, 400, "kvtier.document"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "document", "document_id": "as-ids"}]}]},
            400,
            "messages",
        ),
    ],
)
def test_a_request_that_cannot_have_the_document_is_told_why(
    worker: ServerInThread, path: str, change: dict, status: int, param: str
) -> None:
    call(worker, "PUT", "/as-chat", json={"text": "some"})
    call(worker, "PUT", "/as-ids", json={"token_ids": [1, 2]})

    answer = worker.post(path, json={"model": MODEL, **change}, headers={"Authorization": f"Bearer {ANN}"})

    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_a_document_of_an_adapter_is_that_adapter_s_alone(tmp_path: Path) -> None:
    name, folder = next(iter(save_adapters("llama", tmp_path).items()))
    with serving(build("llama"), {**tables(), "lora": {name: {"path": str(folder)}}}) as server:
        document = put(server, "report", text=text_of(12), model=name)
        part = [{"type": "document", "document_id": "report"}, {"type": "text", "text": "Who?"}]

        hits = [cached(chat(server, part, model=model).json()["usage"]) for model in (MODEL, name)]

    assert document["model"] == name
    assert hits == [0, pytest.approx(document["num_tokens"], abs=BLOCK_SIZE)]


@pytest.mark.parametrize("document_id", [".", ".."])
def test_an_id_that_means_another_place_in_a_path_is_refused(worker: ServerInThread, document_id: str) -> None:
    with closing(HTTPConnection("127.0.0.1", worker.port, timeout=DEADLINE_S)) as connection:  # sends a path as it is
        path = f"/v1/kvtier/documents/{document_id}"
        connection.request("PUT", path, json.dumps({"text": "a"}), {"Authorization": f"Bearer {ANN}"})
        answer = connection.getresponse()

        assert (answer.status, b"alone" in answer.read()) == (400, True)


def test_a_document_whose_client_leaves_before_its_turn_is_never_tokenized(worker: ServerInThread) -> None:
    tokenizers, gate = worker.service.llm.tokenizers, threading.Event()
    blocking = [
        asyncio.run_coroutine_threadsafe(tokenizers.run(lambda _: gate.wait(DEADLINE_S), tenant), worker.loop)
        for tenant in ("ann", "bob")
    ]
    try:
        come_true(lambda: tokenizers.num_running == 2)
        with closing(HTTPConnection("127.0.0.1", worker.port, timeout=DEADLINE_S)) as connection:
            headers = {"Authorization": f"Bearer {ANN}"}
            connection.request("PUT", "/v1/kvtier/documents/never", json.dumps({"text": "a"}), headers)
            come_true(lambda: tokenizers.num_waiting == 1)

        come_true(lambda: tokenizers.num_waiting == 0)
    finally:
        gate.set()
        for job in blocking:
            job.result(DEADLINE_S)
    assert call(worker, "GET", "/never").status_code == 404


@pytest.mark.long
def test_damaged_files_are_told_to_their_tenant_and_can_be_put_again_or_deleted(tmp_path: Path) -> None:
    folder, keys = tmp_path / "documents", {ANN: "ann", BOB: "bob"}
    config = {**tables(num_slots=100), "documents": {"path": str(folder)}}
    model = build("llama")
    with serving(model, config, keys) as server:
        for name in ("a", "b", "c"):
            put(server, name, text=f"document {name}")
    for name in ("a", "b"):
        file = folder / file_name("ann", name)
        file.write_bytes(file.read_bytes()[:-1])

    with serving(model, config, keys) as server:
        there = call(server, "GET", "").json()
        one = call(server, "GET", "/a").json()
        foreign = call(server, "GET", "/a", BOB)
        foreign_list = call(server, "GET", "", BOB).json()["data"]
        again = put(server, "a", text="document a")
        deleted = call(server, "DELETE", "/b")
        last = call(server, "GET", "").json()["data"]

    assert there["survive_restarts"]
    assert [(it["id"], it["status"]) for it in there["data"]] == [
        ("c", "evicted"),
        (None, "damaged"),
        (None, "damaged"),
    ]
    assert "do not match their digest" in one["error"]
    assert (foreign.status_code, foreign_list) == (404, [])
    assert (again["status"], deleted.status_code) == ("ready", 200)
    assert [it["id"] for it in last] == ["c", "a"]


# --- from the command line, and over a restart


def doc(capsys: pytest.CaptureFixture[str], server: Address, *arguments: object) -> tuple[int, str]:
    """Run `kvtier doc`: what it prints, and its exit status."""
    action, *others = map(str, arguments)
    capsys.readouterr()  # drops what other threads have written until now
    status = main(["doc", action, "--url", server.url, *others])
    written = capsys.readouterr()
    return status, written.out + written.err


@pytest.mark.long
def test_documents_and_pins_survive_a_restart_and_a_question_after_it_loads(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, keys, marker = tmp_path / "my report.txt", tmp_path / "keys.toml", "confidential-marker"
    file.write_text(f"{marker} {text_of(8, 2000)}")
    keys.write_text(f'[keys]\n"{ANN}" = "ann"\n')
    keys.chmod(0o600)
    monkeypatch.setenv("KVTIER_API_KEY", ANN)
    arguments = (tmp_path, model_folder, CONFIG.format(folder=tmp_path), "--api-keys", keys)

    with serving_process(*arguments) as server:
        status, written = doc(capsys, server, "add", file, "--json")
        document = json.loads(written)
        assert (status, document["id"], document["status"]) == (0, "my-report.txt", "ready")
        status, written = doc(capsys, server, "pin", "my-report.txt", "--ttl", "12h")
        assert (status, "12h" in written) == (0, True)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        log = server.log.read_text()

    with serving_process(*arguments) as server:
        status, written = doc(capsys, server, "ls")
        assert "my-report.txt" in written
        assert "12h" in written
        come_true(lambda: json.loads(doc(capsys, server, "show", "my-report.txt", "--json")[1])["pin"]["is_held"])
        part = [{"type": "document", "document_id": "my-report.txt"}, {"type": "text", "text": "Who?"}]
        answer = chat(server, part).json()
        assert answer["kvtier"]["tokens"]["device"] == 0
        assert answer["kvtier"]["tokens"]["host"] >= document["num_tokens"] - BLOCK_SIZE
        status, written = doc(capsys, server, "warm", "my-report.txt", "--tier", "device")
        assert (status, "ready" in written) == (0, True)
        assert doc(capsys, server, "pin", "my-report.txt", "--end")[0] == 0
        assert doc(capsys, server, "rm", "my-report.txt") == (0, "my-report.txt: deleted\n")
        assert "no documents" in doc(capsys, server, "ls")[1]
        log += server.log.read_text()

    assert marker not in log
    assert "my-report" not in log
    assert '"path": "/v1/kvtier/documents/{id}"' in log


@pytest.mark.slow
def test_a_killed_server_has_left_its_documents_and_pins(tmp_path: Path, model_folder: Path) -> None:
    arguments = (tmp_path, model_folder, CONFIG.format(folder=tmp_path))
    with serving_process(*arguments) as server:
        document = put(server, "report", text=text_of(9, 2000))
        assert call(server, "POST", "/report/pin", json={"ttl_s": 3600}).status_code == 200
        come_true(lambda: call(server, "GET", "/report").json()["pin"]["is_held"])
        assert call(server, "PUT", "/other", json={"text": text_of(10, 2000)}).status_code == 201
        server.signal(signal.SIGKILL)
        server.wait()

    with serving_process(*arguments) as server:
        assert [it["id"] for it in call(server, "GET", "").json()["data"]] == ["report", "other"]
        for name in ("report", "other"):
            come_true(lambda name=name: call(server, "GET", f"/{name}").json()["status"] == "ready")
        come_true(lambda: call(server, "GET", "/report").json()["pin"]["is_held"])
        part = [{"type": "document", "document_id": "report"}, {"type": "text", "text": "Who?"}]
        assert cached(chat(server, part).json()["usage"]) >= document["num_tokens"] - BLOCK_SIZE


def test_the_command_says_in_one_line_what_is_wrong(
    worker: ServerInThread, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    binary, good = tmp_path / "b.bin", tmp_path / "good.txt"
    binary.write_bytes(b"\xff\xfe")
    good.write_text("good")

    def wrong(*arguments: object) -> str:
        status, written = doc(capsys, worker, *arguments)
        assert (status, written.count("\n")) == (2, 1), written
        return written

    assert "KVTIER_API_KEY" in wrong("ls")
    assert "not UTF-8 text" in wrong("add", binary)
    assert "give --id" in wrong("add", "-")
    assert "No such file" in wrong("add", tmp_path / "nothing")
    assert "no document with this id" in wrong("show", "nothing", "--api-key", ANN)
    assert "1 to 128" in wrong("add", good, "--id", "a b", "--api-key", ANN)
    assert "1 to 128" in wrong("add", good, "--id", "a/b", "--api-key", ANN)
    assert "not a server URL" in wrong("ls", "--url", "ftp://x")
    assert "kvtier serve" in wrong("ls", "--url", "http://127.0.0.1:9")


def test_the_command_waits_or_not_and_tells_what_failed(
    worker: ServerInThread, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "long.txt"
    file.write_text(text_of(11, 2500))

    status, written = doc(capsys, worker, "add", file, "--no-wait", "--api-key", ANN)
    assert (status, "2,507" in written) == (0, True)
    status, written = doc(capsys, worker, "add", file, "--api-key", ANN)
    assert (status, "ready" in written) == (0, True)
