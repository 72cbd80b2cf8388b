"""Adapters are served as models: in `/v1/models`, in requests, and with `--lora`."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from lora_adapters import ADAPTERS, plain_adapted, save_adapters
from serving import MODEL, ServerInThread, serving, tables
from small_models import build, plain_greedy

from kvtier.cli.main import main

PROMPT = "What is in the report of the year before last, and who wrote it? " * 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_adapters("llama", tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def adapted(folders: dict[str, Path]) -> Iterator[ServerInThread]:
    """A server of the small Llama and its adapters."""
    lora = {name: {"path": str(folder)} for name, folder in folders.items()}
    with serving(build("llama"), {**tables(), "lora": lora}) as address:
        yield address


def test_adapters_are_listed_behind_their_base_model(adapted: ServerInThread) -> None:
    listed = adapted.get("/v1/models").json()["data"]

    assert [(model["id"], model["parent"]) for model in listed] == [
        (MODEL, None),
        *((name, MODEL) for name in ADAPTERS),
    ]
    assert adapted.openai().models.retrieve("mlp").id == "mlp"
    assert adapted.get("/v1/models/other").status_code == 404


def test_the_model_of_a_request_chooses_the_adapter_and_its_blocks(
    adapted: ServerInThread, folders: dict[str, Path]
) -> None:
    names = [MODEL, *ADAPTERS]
    first, again = (
        [adapted.complete(PROMPT, model=name, max_tokens=6, logprobs=0) for name in names] for _ in range(2)
    )

    ids = list(PROMPT.encode())
    for name, answer in zip(names, again, strict=True):
        model = build("llama") if name == MODEL else plain_adapted(build("llama"), folders[name])
        expected = plain_greedy(model, prompt_ids(adapted), 6)
        assert answer["model"] == name
        assert answer["choices"][0]["text"] == text_of(adapted, expected)
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in first] == [0] * 4
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in again]
    assert cached == [len(ids) - 1] * 4
    assert adapted.is_at_rest()


def prompt_ids(server: ServerInThread) -> list[int]:
    return server.ask(lambda core: core.tokenizer(PROMPT)["input_ids"])


def text_of(server: ServerInThread, token_ids: list[int]) -> str:
    return server.ask(lambda core: core.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))


def test_a_chat_with_an_adapter_streams_under_its_name(adapted: ServerInThread) -> None:
    messages = [{"role": "user", "content": "Who are you?"}]

    chunks = adapted.openai().chat.completions.create(model="all", messages=messages, stream=True, max_tokens=4)

    assert {chunk.model for chunk in chunks} == {"all"}


def test_an_unknown_model_is_answered_with_those_that_are_there(adapted: ServerInThread) -> None:
    with pytest.raises(openai.NotFoundError, match=f"use one of {MODEL}, all, ranked, mlp"):
        adapted.openai().completions.create(model="legal", prompt="x")


def test_an_adapter_with_the_models_own_name_is_refused(folders: dict[str, Path]) -> None:
    clash = {**tables(), "lora": {MODEL: {"path": str(folders["mlp"])}}}
    with pytest.raises(ValueError, match="the model itself has this name"), serving(build("llama"), clash):
        raise AssertionError("it serves")


def test_the_plan_refuses_an_adapter_of_another_model(
    model_folder: Path, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["serve", "--model", str(model_folder), "--check-config", "--lora", f"good={folders['all']}"]
    good = main(command)
    capsys.readouterr()

    bad = main([*command, "--lora", f"bad={tmp_path}"])

    assert (good, bad) == (0, 2)
    refused = capsys.readouterr().out.partition("refused:")[2]
    assert "lora bad: " in refused
    assert "lora good: " not in refused


def test_an_adapter_on_the_command_line_needs_a_name_and_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--model", "m", "--lora", "folder"])

    assert "'folder' is not NAME=FOLDER" in capsys.readouterr().err
