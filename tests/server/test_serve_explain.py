"""`/v1/kvtier/explain`: why a prompt was found or not, told by a real server to those whose request it was."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from lora_adapters import ADAPTERS, save_adapter
from serving import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    MODEL,
    TEMPLATE,
    ServerInThread,
    chat_tokenizer,
    come_true,
    serving,
    tables,
)
from small_models import build, byte_tokenizer

from kvtier.engine.observability.explain.evidence import Evidence
from kvtier.engine.observability.explain.explanation import Explanation

ANN, BOB = "sk-ann-1111", "sk-bob-3333"
KEYS = {ANN: "ann", BOB: "bob"}
EXPLAIN = "/v1/kvtier/explain"
NUM_TOKENS = 10 * BLOCK_SIZE + 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerInThread]:
    folder = save_adapter(build("llama"), tmp_path_factory.mktemp("lora"), **ADAPTERS["all"])
    config = {
        **tables(40),
        "host": {"capacity": 40 * BLOCK_BYTES},
        "lora": {"legal": {"path": str(folder)}},
    }
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% if today is defined %}<{{ today }}>{% endif %}" + TEMPLATE
    with serving(build("llama"), config, tokenizer=tokenizer) as address:
        yield address


@pytest.fixture(scope="module")
def strict() -> Iterator[ServerInThread]:
    with serving(build("llama"), tables(), KEYS) as address:
        yield address


def prompt_of(seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32, 127) for _ in range(num_tokens)]


def ask(server: ServerInThread, request_id: str, prompt: object, key: str = "none", **others: object) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "ignore_eos": True, **others}
    headers = {"Authorization": f"Bearer {key}", "x-request-id": request_id}
    answer = server.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


def explained(server: ServerInThread, request_id: str, key: str = "none") -> dict:
    headers = {"Authorization": f"Bearer {key}"}
    come_true(lambda: server.get(f"{EXPLAIN}/{request_id}", headers=headers).status_code == 200)
    (found,) = server.get(f"{EXPLAIN}/{request_id}", headers=headers).json()["data"]
    return found


def rows(found: dict) -> list[tuple[int, int, str | None, str | None]]:
    return [(row["start"], row["end"], row["hit"], row["missed"]) for row in found["rows"]]


def test_a_new_prompt_was_never_seen_and_the_same_again_is_a_hit(server: ServerInThread) -> None:
    ask(server, "new", prompt_of(1))
    ask(server, "again", prompt_of(1))

    whole = NUM_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    assert rows(explained(server, "new")) == [(0, whole, None, "never_seen"), (whole, NUM_TOKENS, None, "last_block")]
    assert rows(explained(server, "again"))[0] == (0, whole, "device", None)
    assert explained(server, "again")["departure"] == {
        "shared_tokens": NUM_TOKENS,
        "departs": False,
        "text": None,
        "before": None,
    }


def test_the_first_token_that_differs_is_named_and_its_text_only_to_who_has_the_prompt(server: ServerInThread) -> None:
    first = prompt_of(2)
    second = [*first[:90], ord("#"), *prompt_of(3)]
    ask(server, "first", first)
    ask(server, "second", second)

    found = explained(server, "second")
    answer = server.post(EXPLAIN, json={"prompt": second, "request_id": "second"}).json()["data"][0]
    other = server.post(EXPLAIN, json={"prompt": first, "request_id": "second"})

    assert found["departure"] == {"shared_tokens": 90, "departs": True, "text": None, "before": None}
    assert answer["departure"]["text"] == byte_tokenizer().decode([ord("#")])
    assert answer["departure"]["before"] == byte_tokenizer().decode(first[78:90])
    assert answer["rows"] == found["rows"]
    assert (other.status_code, other.json()["error"]["code"]) == (409, "other_prompt")


def test_an_evicted_prompt_is_told_with_tier_cause_time_and_what_ran_meanwhile(server: ServerInThread) -> None:
    ask(server, "early", prompt_of(4))
    for number in range(10):
        ask(server, f"crowd-{number}", prompt_of(100 + number, 20 * BLOCK_SIZE))
    ask(server, "late", prompt_of(4))

    (row, *_) = explained(server, "late")["rows"]
    assert (row["missed"], row["evicted"]["cause"]) == ("evicted_from_host", "room")
    early, late = explained(server, "early"), explained(server, "late")
    assert early["arrived_at"] < row["evicted"]["first_at"] <= row["evicted"]["last_at"] < late["arrived_at"] + 1
    assert set(row["evicted"]["during"]) <= {f"crowd-{number}" for number in range(10)}
    assert row["evicted"]["during"]


def test_the_field_that_differs_is_named(server: ServerInThread) -> None:
    prompt = prompt_of(5)
    ask(server, "plain", prompt)
    ask(server, "salted", prompt, cache_salt="secret-salt")
    ask(server, "adapted", prompt, model="legal")

    assert rows(explained(server, "plain"))[0][3] == "never_seen"
    for request_id, field in (("salted", "cache_salt"), ("adapted", "adapter")):
        (row, *_) = explained(server, request_id)["rows"]
        assert (row["missed"], row["differs"]) == ("other", [field])
    assert "secret" not in str(explained(server, "salted"))


def test_other_text_of_the_template_for_the_same_messages_is_named(server: ServerInThread) -> None:
    messages = [{"role": "user", "content": "What is the capital of France, please?"}]
    for request_id, kwargs in (("usual", {}), ("dated", {"today": "2026-11-23, a Monday"})):
        body = {"model": MODEL, "messages": messages, "max_tokens": 1, "chat_template_kwargs": kwargs}
        answer = server.post("/v1/chat/completions", json=body, headers={"x-request-id": request_id})
        assert answer.status_code == 200, answer.text

    row = next(row for row in explained(server, "dated")["rows"] if row["missed"])

    assert row["start"] == 1  # both begin with <
    assert (row["missed"], row["differs"]) == ("other_template", ["template"])
    assert rows(explained(server, "usual"))[0][3] == "never_seen"


def test_short_skipped_and_unknown_prompts(server: ServerInThread) -> None:
    ask(server, "short", prompt_of(7, BLOCK_SIZE - 1))
    ask(server, "skips", prompt_of(7), kvtier={"skip_reading_prefix_cache": True})

    assert rows(explained(server, "short")) == [(0, BLOCK_SIZE - 1, None, "shorter_than_block")]
    assert rows(explained(server, "skips"))[0][3] == "skipped"
    for unknown in ("nobody", "no%2Fbody", "%ff"):
        answer = server.get(f"{EXPLAIN}/{unknown}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")


def test_a_prompt_is_explained_before_it_is_asked_and_that_changes_nothing(server: ServerInThread) -> None:
    text = "A text that nobody has asked about so far, and that has more than one block of tokens."

    before = server.post(EXPLAIN, json={"prompt": text}).json()["data"][0]
    again = server.post(EXPLAIN, json={"prompt": text}).json()["data"][0]
    ask(server, "text", text)
    after = server.post(EXPLAIN, json={"prompt": text}).json()["data"][0]

    assert before == again
    assert before["id"] is None
    assert before["rows"][0]["missed"] == "never_seen"
    assert after["rows"][0]["hit"] == "device"


@pytest.mark.parametrize(
    "body", [{}, {"prompt": ""}, {"prompt": []}, {"prompt": "a", "messages": []}, {"prompt": "a", "else": 1}]
)
def test_a_question_that_is_none_is_refused(server: ServerInThread, body: dict) -> None:
    assert server.post(EXPLAIN, json=body).status_code == 400


def test_another_tenants_request_is_unknown_and_its_salts_look_like_nothing_seen(strict: ServerInThread) -> None:
    prompt = prompt_of(8)
    ask(strict, "anns", prompt, ANN)
    ask(strict, "bobs", prompt, BOB)
    ask(strict, "anns-too", prompt, ANN, cache_salt="mine")

    bob = {"Authorization": f"Bearer {BOB}"}
    answers = [strict.get(f"{EXPLAIN}/{each}", headers=bob) for each in ("anns", "never-was")]
    (row, *_) = explained(strict, "bobs", BOB)["rows"]
    (own, *_) = explained(strict, "anns-too", ANN)["rows"]

    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].json()["error"]["message"] == answers[1].json()["error"]["message"]
    assert (row["missed"], row["differs"]) == ("never_seen", [])
    assert (own["missed"], own["differs"]) == ("other", ["cache_salt"])
    assert explained(strict, "bobs", BOB)["departure"] is None


def test_another_namespace_is_told_from_the_file_beside_the_store(tmp_path: Path) -> None:
    config = {**tables(), "disk": {"path": str(tmp_path / "store"), "capacity": "64MiB"}}
    with serving(build("llama"), config) as address:
        ask(address, "before", prompt_of(9))
    seeded = {**config, "names": {"seed": "another seed"}}
    with serving(build("llama"), seeded) as address:
        ask(address, "after", prompt_of(9))

        (row, *_) = explained(address, "after")["rows"]

    assert (row["missed"], row["differs"]) == ("other", ["namespace: hash_seed"])
    file = tmp_path / "store-seen"
    assert file.stat().st_mode & 0o777 == 0o600
    assert b"another seed" not in file.read_bytes()


def test_an_id_that_many_requests_have_keeps_the_engine_for_a_moment_at_a_time(
    server: ServerInThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked_out: list[int] = []
    explanation = Evidence.explanation

    def noted(evidence: Evidence) -> Explanation:
        worked_out.append(threading.get_ident())
        return explanation(evidence)

    monkeypatch.setattr(Evidence, "explanation", noted)
    for number in range(6):
        ask(server, "same", prompt_of(200 + number))
    come_true(lambda: server.ask(lambda core: len(core.explainer.find("same", None))) == 6)

    found = server.get(f"{EXPLAIN}/same").json()["data"]

    assert len(found) == len(worked_out) == 6
    assert server.ask(lambda _: threading.get_ident()) not in worked_out


def test_without_keys_a_guess_under_another_salt_is_told_nothing(server: ServerInThread) -> None:
    messages = [{"role": "user", "content": "The board meets on Friday, and nobody else must know of that."}]
    chat = {"model": MODEL, "messages": messages, "max_tokens": 1, "cache_salt": "the victim's"}
    ask(server, "victims", prompt_of(300), cache_salt="the victim's")
    assert server.post("/v1/chat/completions", json=chat, headers={"x-request-id": "chat"}).status_code == 200
    come_true(lambda: server.ask(lambda core: len(core.explainer.find("chat", None))) == 1)

    def told(**body: object) -> list[dict]:
        answer = server.post(EXPLAIN, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"][0]["rows"]

    for salt in ({}, {"cache_salt": "a guess"}):
        assert told(prompt=prompt_of(300), **salt) == told(prompt=prompt_of(301), **salt)
        other_text = {"chat_template_kwargs": {"today": "2026-11-23"}, **salt}
        assert {row["missed"] for row in told(messages=messages, **other_text)} == {"never_seen", "last_block"}
