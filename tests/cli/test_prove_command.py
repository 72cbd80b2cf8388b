"""`kvtier prove`: its table and its JSON, its exit statuses, and mistakes that cost one line."""

import json
import sys
from pathlib import Path

import pytest
from fake_completions import FakeServer, fake_server

from kvtier.cli.main import main

FEW = ["--lengths", "200", "--rounds", "2", "--seed", "3"]
FIRST_STAGE = "kvtier: asking which options the server accepts"


def prove(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run the command: its exit status, stdout and stderr."""
    capsys.readouterr()
    try:
        status = main(["prove", *(str(argument) for argument in arguments)])
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


def flipped(content: bytes, server: FakeServer) -> bytes:
    return content if content[0] % 8 else bytes(32)


def test_a_server_that_is_right_ends_with_0_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        status, out, _ = prove(capsys, server.url + "/v1", *FEW)

    row = next(line for line in out.splitlines() if "half shared" in line)
    assert status == 0
    assert row.split()[2:5] == ["200", "2", "96"]
    assert row.split()[-1] == "proven"
    assert "What this run cannot tell:\n- No prompts were evicted" in out
    assert out.splitlines()[-1].startswith("proven, as far as this test can tell: 18 answers")


@pytest.mark.long
def test_a_server_that_is_wrong_ends_with_1_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(read=flipped) as server:
        status, out, _ = prove(capsys, server.url, *FEW)

    assert status == 1
    assert "WRONG same prompt, 200 tokens, alone: the answer is off by" in out
    assert out.splitlines()[-1].startswith("wrong: ")


def test_a_server_without_a_cache_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(caches=False) as server:
        status, out, _ = prove(capsys, server.url, *FEW)

    assert status == 2
    assert "- Nothing seems to have come from a cache." in out
    assert "proven," not in out
    assert out.splitlines()[-1].startswith("unproven: no wrong answer was found, but")


@pytest.mark.long
def test_json_has_each_row_and_the_prompts_of_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(read=flipped) as server:
        status, out, _ = prove(capsys, server.url, "--json", *FEW)

    report = json.loads(out)
    row = next(row for row in report["rows"] if row["prompt"] == "goes on")
    finding = next(each for each in report["findings"] if each["where"].startswith("goes on"))
    assert (status, report["verdict"]) == (1, "wrong")
    assert report["askers"] == [{"name": "the model", "url": server.url, "model": "small"}]
    assert (row["tokens"], row["asked"], row["verdict"]) == (200, 2, "wrong")
    assert finding["prompt"][: len(finding["earlier"])] == finding["earlier"]
    assert finding["answer"] not in finding["computed"]
    assert report["doubts"]


@pytest.mark.long
def test_answers_without_log_probabilities_have_no_number_and_still_are_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_server(read=flipped, tells_logprobs=False) as server:
        status, out, _ = prove(capsys, server.url, "--json", *FEW)

    report = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert status == 1
    assert "the text differs from answers without the cache" in {finding["what"] for finding in report["findings"]}


@pytest.mark.long
def test_what_is_to_happen_in_between_happens_once_and_prints_nothing_into_the_report(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    happened = tmp_path / "happened"
    with fake_server() as server:
        status = main(["prove", server.url, "--json", *FEW, "--between", f"echo told; echo x >> {happened}"])

    out, err = capfd.readouterr()
    assert (status, happened.read_text()) == (0, "x\n")
    assert "--evict or --between" not in json.loads(out)["doubts"]
    assert "told" in err


@pytest.mark.long
def test_a_server_that_is_away_in_between_is_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvtier.cli.prove.push_out.PAUSE_S", 0.0)
    with fake_server() as server:
        server.refuses_once_there = tmp_path / "away"
        status, _, _ = prove(capsys, server.url, *FEW, "--between", f"touch {tmp_path / 'away'}")

    assert (status, server.num_refused) == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "URL"),
        (["localhost:8000"], "localhost:8000: is not a server URL; write it as http://127.0.0.1:8000"),
        (["http://[::1"], "is not a server URL"),
        (["http://127.0.0.1:1"], "http://127.0.0.1:1: "),
        (["http://127.0.0.1:1", "--lengths", "10"], "--lengths: '10' is not a list of lengths; write it as 200,1000"),
        (["http://127.0.0.1:1", "--lengths", "many"], "--lengths"),
        (["http://127.0.0.1:1", "--rounds", "0"], "--rounds: '0' is not a valid number; give 1 or more"),
        (["http://127.0.0.1:1", "--model", ""], "--model: is empty"),
    ],
)
def test_a_mistake_is_one_line_and_ends_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    status, out, err = prove(capsys, *arguments)

    *stages, last = err.splitlines()
    assert (status, out) == (2, "")
    assert last.startswith("kvtier: ")
    assert named in last
    assert stages in ([], [FIRST_STAGE])


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "arguments", "named"),
    [
        ({}, ["--model", "large"], "/v1/completions: 400 there is no model large"),
        ({}, ["--adapter", "legal"], "/v1/completions: 400 there is no model legal"),
        ({"fails_after": 40}, [], "/v1/completions: 500 the engine has ended"),
        ({}, ["--between", "exit 3"], "--between 'exit 3' ended with status 3; it must end with 0"),
        ({"max_model_len": 90}, [], "the model takes at most 90 tokens, which are too few for this test"),
    ],
)
def test_what_a_server_refuses_is_the_last_line_and_ends_with_2(
    capsys: pytest.CaptureFixture[str], options: dict, arguments: list[str], named: str
) -> None:
    with fake_server(**options) as server:
        status, out, err = prove(capsys, server.url, *(FEW[2:] if "max_model_len" in options else FEW), *arguments)

    first, *_, last = err.splitlines()
    assert (status, out, first) == (2, "", FIRST_STAGE)
    assert named in last


@pytest.mark.long
def test_the_key_of_the_environment_goes_along(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_server(key="secret") as server:
        without, _, told = prove(capsys, server.url, *FEW)
        monkeypatch.setenv("KVTIER_API_KEY", "secret")
        with_key, _, _ = prove(capsys, server.url, *FEW)

    assert (without, with_key) == (2, 0)
    assert "401" in told


def test_without_its_package_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    for name in [name for name in sys.modules if name.startswith(("kvtier.cli.prove", "kvtier.cli.prove.command"))]:
        monkeypatch.delitem(sys.modules, name)

    status, _, err = prove(capsys, "http://127.0.0.1:1")

    assert status == 2
    assert "pip install 'kvtier[prove]'" in err
