"""The engine's records of requests that came over HTTP."""

from serving import ServerInThread

PROMPT = list(range(5, 60))


def test_a_record_has_the_request_id_of_its_answer(server: ServerInThread) -> None:
    answer = server.post("/v1/completions", json={"model": "small", "prompt": PROMPT, "max_tokens": 2})

    record = server.ask(lambda core: core.records.newest()[0])
    assert record.request_id == answer.headers["x-request-id"]
    assert record.tokens.num_tokens == len(PROMPT)


def test_each_of_several_choices_has_a_record_of_its_own(server: ServerInThread) -> None:
    body = {"model": "small", "prompt": [PROMPT, PROMPT[:30]], "max_tokens": 2, "n": 2, "temperature": 1.0}

    server.post("/v1/completions", json=body, headers={"x-request-id": "several"})

    ids = server.ask(lambda core: [each.request_id for each in core.records.newest()])
    assert {each for each in ids if each.startswith("several")} == {f"several-{number}" for number in range(4)}
