"""The command line: help that helps, and mistakes that cost one line."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_models import build

from kvtier.cli.arguments import remote_url
from kvtier.cli.doc_arguments import MAX_DAYS
from kvtier.cli.main import build_parser, main
from kvtier.cli.serve_arguments import model_of
from kvtier.server.documents.document import MAX_PINNED_S

PROCESS_TIMEOUT_S = 300.0  # for what takes seconds: reached only when a test fails


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run the command: its exit status, stdout and stderr."""
    capsys.readouterr()
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "example"),
    [
        (["--help"], "kvtier demo --json"),
        (["--help"], "kvtier check ~/.cache/kvtier"),
        (["--help"], "kvtier serve --model"),
        (["serve", "--help"], "kvtier serve --model Qwen/Qwen3-0.6B --config laptop"),
        (["demo", "--help"], "kvtier demo --json"),
        (["check", "--help"], "kvtier check ~/.cache/kvtier --fix"),
        (["stats", "--help"], "kvtier stats ~/.cache/kvtier --json"),
        (["store", "--help"], "kvtier store ls ~/.cache/kvtier"),
        (["store", "ls", "--help"], "kvtier store ls ~/.cache/kvtier"),
        (["store", "rm", "--help"], "kvtier store rm ~/.cache/kvtier --all-but"),
    ],
)
def test_help_shows_examples(capsys: pytest.CaptureFixture[str], arguments: list[str], example: str) -> None:
    status, out, err = run(capsys, *arguments)

    assert (status, err) == (0, "")
    assert "examples:" in out
    assert example in out


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser and those of all its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers_of(command)


@pytest.mark.parametrize("parser", list(parsers_of(build_parser())), ids=lambda parser: parser.prog)
def test_each_command_has_sentences_examples_and_its_defaults(parser: argparse.ArgumentParser) -> None:
    either = {action for group in parser._mutually_exclusive_groups for action in group._group_actions}
    optional = [
        action
        for action in parser._actions
        if action.option_strings and action.nargs != 0 and not action.required and action not in either
    ]

    sentence = r"[A-Z][^.]+(\.\w[^.]*)*\."
    assert re.fullmatch(f"{sentence}( {sentence})*", parser.description)
    assert parser.epilog.startswith("examples:\n  kvtier ")
    shown = [action for action in optional if action.help != argparse.SUPPRESS]
    assert [action.dest for action in shown if "(default: " not in action.help] == []
    assert [action.dest for action in parser._actions if not action.help and action.nargs != argparse.PARSER] == []


def examples_of(parser: argparse.ArgumentParser) -> Iterator[list[str]]:
    """Yield the arguments of each `kvtier ...` line in the parser's examples, without comments and redirections."""
    for line in str(parser.epilog).replace("\\\n", " ").splitlines():
        if line.startswith("  kvtier "):
            command = re.split(r"\s{2,}|\s[|<>]", re.sub(r"\s{2,}--", " --", line.strip()))[0]
            yield shlex.split(command)[1:]


EXAMPLES = {" ".join(words): words for parser in parsers_of(build_parser()) for words in examples_of(parser)}


@pytest.mark.parametrize("words", EXAMPLES.values(), ids=EXAMPLES)
def test_each_example_of_a_help_text_is_a_command_that_the_parser_takes(words: list[str]) -> None:
    options = build_parser().parse_args(words)

    assert callable(options.run)


def test_there_are_examples_of_all_commands() -> None:
    top = next(each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    shown = {words[0] for words in EXAMPLES.values()}
    parsers = {id(parser): set() for parser in top.choices.values()}
    for name, parser in top.choices.items():
        parsers[id(parser)].add(name)

    assert [names for names in parsers.values() if not names & shown and not names & {"ls", "rm"}] == []


def test_help_needs_neither_torch_nor_transformers() -> None:
    script = """
import sys
from kvtier.cli.main import build_parser, main
try:
    main(["--help"])
except SystemExit:
    pass
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", script]

    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, check=True)

    assert done.stdout.splitlines()[-1] == "[]"


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--version")

    assert (status, err) == (0, "")
    assert out.startswith("kvtier ")
    assert len(out.splitlines()) == 1


def test_the_command_starts_from_a_shell_and_ends_with_2_on_a_mistake() -> None:
    command = [sys.executable, "-m", "kvtier.cli.main", "demo", "--tokens", "many"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert "--tokens" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["demo", "--nonsense"], "--nonsense"),
        (["demo", "--tokens", "many"], "--tokens"),
        (["demo", "--device", "tpu"], "--device"),
        (["nonsense"], "nonsense"),
        ([], "COMMAND"),
        (["check"], "STORE"),
        (["stats", "/no/such/store"], "/no/such/store"),
        (["store"], "COMMAND"),
        (["store", "rm", "/no/such/store"], "--namespace"),
        (["demo", "--document", ""], "--document: is empty"),
        (["demo", "--model", ""], "--model: is empty"),
        (["demo", "--tokens", "999"], "1000 or more"),
        (["demo", "--tokens", "-5"], "1000 or more"),
        (["demo", "--tokens", "1000000000"], "--tokens 1000000000: the model takes at most 65,536"),
        (["demo", "--model", "/no/such/model"], "/no/such/model"),
        (["demo", "--model", "nobody/no-such-model"], "nobody/no-such-model"),
        (["demo", "--document", "/no/such/file.txt"], "/no/such/file.txt"),
        (["check", ""], "STORE: is empty"),
        (["check", "/no/such/store"], "give the folder that [disk] path names"),
        (["check", "store", "--sample", "0"], "--sample: '0' is not a number of records; give 1 or more"),
        (["check", "store", "--key-file", ""], "--key-file: is empty"),
        (["serve"], "serve: no model; name one, as in 'kvtier serve --model Qwen/Qwen3-0.6B'"),
        (["serve", "gpt2", "--model", "gpt3"], "serve: two models, gpt2 and gpt3"),
        (["serve", "gpt2", "--host", "8GiB"], "is a size, not an address; give the size of host memory as"),
        (["serve", "gpt2", "--block-size", "0"], "--block-size: '0' is not a number of tokens from 1 to 1024"),
        (["serve", "gpt2", "--block-size", "many"], "--block-size: 'many' is not a number of tokens"),
        (["serve", "gpt2", "--device-memory", "0"], "--device-memory: '0' holds no block; give a size"),
        (["serve", "gpt2", "--device-memory", "much"], "--device-memory: bad size 'much'"),
        (["serve", "gpt2", "--host-memory", "-3GiB"], "--host-memory: bad size '-3GiB'; write bytes as an integer, or"),
        (["serve", "gpt2", "--device-memory", "-.5GiB"], "--device-memory: bad size '-.5GiB'"),
        (["serve", "gpt2", "--block-size", "-16"], "--block-size: '-16' is not a number of tokens"),
        (["serve", "gpt2", "--port", "-1"], "--port: '-1' is not a port"),
        (["sidecar", "--host-memory", "-3GiB"], "--host-memory: bad size '-3GiB'"),
        (
            ["sidecar", "--host-memory", "8GB4"],
            "--host-memory: bad size '8GB4'; write bytes as an integer, or a string",
        ),
        (["sidecar", "--http-port", "99999"], "--http-port: '99999' is not a port; give 0 to 65535"),
        (["sidecar", "--chunk-tokens", "-8x"], "--chunk-tokens: '-8x' is not a number"),
        (["route", "http://a:1", "--port", "99999"], "--port: '99999' is not a port; give a number from 0"),
        (["top", "--interval", "-1s"], "--interval: '-1s' is not a number of seconds"),
        (["bench-remote", "file:///tmp/x", "--block", "-1MiB"], "--block: bad size '-1MiB'"),
        (["serve", "gpt2", "--host-memory", "0", "--disk", "/x:1GiB"], "[disk] needs [host]"),
        (["serve", "gpt2", "--disk", "/x"], "--disk: '/x' is not PATH:SIZE, such as ~/.cache/kvtier:500GiB"),
        (["serve", "gpt2", "--disk", "/x:many"], "--disk: bad size 'many'"),
        (["serve", "gpt2", "--disk", "/x:0"], "capacity 0 stores nothing"),
        (
            ["serve", "gpt2", "--disk", "/x:1GiB", "--sidecar", "unix:///s"],
            "--disk: the sidecar has the tiers below the device",
        ),
        (["serve", "gpt2", "--gpu-memory-utilization", "90"], "'90' is not a fraction of the GPU's memory above 0"),
        (["serve", "gpt2", "--gpu-memory-utilization", "nan"], "'nan' is not a fraction of the GPU's memory"),
        (["serve", "gpt2", "--gpu-memory-utilization", ".9", "--device-memory", "1GiB"], "not allowed with argument"),
        (["serve", "--model", ""], "--model: is empty"),
        (["serve", "--model", "gpt2", "--port", "many"], "--port: 'many' is not a port; give a number from 0"),
        (["serve", "--model", "gpt2", "--port", "99999"], "--port: '99999' is not a port; give a number from 0"),
        (["serve", "--model", "gpt2", "--host", ""], "--host: is empty"),
        (["serve", "--model", "gpt2", "--model-name", ""], "--served-model-name: is empty"),
        (["serve", "--model", "gpt2", "--api-keys", ""], "--api-keys: is empty"),
        (["serve", "--model", "gpt2", "--lora", "legal"], "'legal' is not NAME=FOLDER; write it as"),
        (["serve", "--model", "gpt2", "--lora", "a=b", "--lora", "a=c"], "--lora a: is given twice"),
        (["serve", "--model", "gpt2", "--log-format", "xml"], "--log-format"),
        (["serve", "--model", "gpt2", "--tool-call-parser", "xml"], "--tool-call-parser"),
        (["serve", "--model", "gpt2", "--tenant-isolation", "maybe"], "--tenant-isolation"),
        (["serve", "--model", "gpt2", "--config", "nonsense"], "use one of gpu-8gb, laptop, longdoc-qa"),
        (["doc"], "COMMAND"),
        (["doc", "add", "/no/such/file.txt"], "/no/such/file.txt"),
        (["doc", "add", "notes.md", "--id", ""], "--id: is empty"),
        (["doc", "add", "notes.md", "--as", "song"], "--as"),
        (["doc", "show", "a/b"], "use 1 to 128 of the characters"),
        (["doc", "warm", "notes.md", "--tier", "disk"], "--tier"),
        (["doc", "pin", "notes.md"], "--ttl"),
        (["doc", "pin", "notes.md", "--ttl", "long"], "--ttl: 'long' is not a duration; write it as 90s"),
        (["doc", "pin", "notes.md", "--ttl", "3651d"], "--ttl: '3651d' is too long; give 3650d or less"),
        (["doc", "ls", "--url", "nonsense"], "--url nonsense: is not a server URL"),
        (["doc", "ls", "--url", "http://[::1"], "--url http://[::1: is not a server URL"),
        (["doc", "ls", "--url", "http://localhost:99999"], "is not a server URL"),
        (["doc", "ls", "--url", "http://127.0.0.1:1"], "start a server with 'kvtier serve"),
        (["doc", "ls", "--api-key", "two words"], "the key has a space or another invalid character"),
        (["doc", "ls", "--url", "http://me@127.0.0.1:1"], "--url contains a user name or password"),
        (["doc", "add", "notes.md", "--cache-salt", "\udcff"], "--cache-salt: is not UTF-8 text"),
        (["explain", "\udcff"], "REQUEST_ID: is not UTF-8 text"),
        (["explain", "a", "--model", "\udcff"], "--model: is not UTF-8 text"),
        (["operate", "reset", "--tenant", "\udcff"], "--tenant: is not UTF-8 text"),
        (["operate", "check", "--token-file", "/dev/null"], "--token-file /dev/null: is empty"),
        (["top", "--once", "--token-file", "/dev/null"], "--token-file /dev/null: is empty"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_that_names_it(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    status, out, err = run(capsys, *arguments)

    *stages, last = err.splitlines()
    assert (status, out) == (2, "")
    assert last.startswith("kvtier: ")
    assert named in last
    assert all(re.match("kvtier: (looking for the model|loading torch|building the model)", line) for line in stages)


@pytest.mark.parametrize("command", [["serve"], ["serve", "--check-config"], ["sidecar"]], ids=" ".join)
def test_more_host_memory_than_the_machine_has_is_a_line_that_asks_for_less(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]
) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    model = [str(tmp_path / "model")] if command[0] == "serve" else []

    status, out, err = run(capsys, *command, *model, "--host-memory", "999TiB")

    last = err.splitlines()[-1]
    assert (status, out) == (2, "")
    assert last.startswith("kvtier: host.capacity 999.0 TiB: is more than the memory of this machine, ")
    assert last.endswith("; give a smaller size")
    assert "mount" not in err


@pytest.mark.parametrize("command", [["serve"], ["sidecar"]], ids=" ".join)
def test_a_disk_tier_larger_than_its_file_system_is_a_line_that_asks_for_less(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]
) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    model = [str(tmp_path / "model"), "--port", "0"] if command[0] == "serve" else []

    status, out, err = run(capsys, *command, *model, "--disk", f"{tmp_path}/disk:999999TiB")

    last = err.splitlines()[-1]
    assert (status, out) == (2, "")
    assert last.startswith(
        f"kvtier: disk.capacity 999,999.0 TiB: is more than the whole file system of {tmp_path}/disk, "
    )
    assert last.endswith("; give a smaller size, or a folder on a larger disk")
    assert "loading torch" not in err
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize("command", [["serve", "gpt2"], ["sidecar"], ["route"]], ids=" ".join)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is a folder; give a TOML file"),
        (b"\x7fELF\xdb\x00", "is not a text file (UTF-8); give a TOML file"),
        (b"[host", "is not valid TOML: "),
    ],
    ids=["a folder", "a binary file", "no TOML"],
)
def test_a_configuration_that_is_no_text_file_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], content: bytes | None, said: str
) -> None:
    file = tmp_path / "kvtier.toml"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)

    status, out, err = run(capsys, *command, "--config", file)

    assert (status, out) == (2, "")
    assert err.startswith(f"kvtier: {file}: {said}")
    assert err.count("\n") == 1


def test_the_former_name_of_the_sidecars_option_is_accepted_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "sidecar", "--help")

    assert "  --host-memory SIZE " in out
    assert "--host " not in out


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["srve", "gpt2"], "srve: no such command; did you mean kvtier serve? see kvtier --help"),
        (["reset", "--all"], "reset: no such command; did you mean kvtier operate reset? see kvtier --help"),
        (["store", "lst", "x"], "lst: no such command; did you mean kvtier store list? see kvtier store --help"),
        (["xyzzy"], "xyzzy: no such command; see kvtier --help"),
        (["serve", "--modle", "gpt2"], "--modle: no such option; did you mean --model? see kvtier serve --help"),
        (
            ["serve", "gpt2", "--gpu-memry=.9"],
            "--gpu-memry: no such option; did you mean --gpu-memory-utilization? see",
        ),
        (
            ["doc", "add", "x", "--aip-key", "a"],
            "--aip-key: no such option; did you mean --api-key? see kvtier doc add",
        ),
        (["--verison"], "--verison: no such option; did you mean --version? see kvtier --help"),
        (["doc", "--hlep"], "--hlep: no such option; did you mean --help? see kvtier doc --help"),
        (["rm", "x", "--zzz"], "--zzz: no such option; see kvtier rm --help"),
    ],
)
def test_a_word_that_is_nothing_says_what_may_be_meant(
    capsys: pytest.CaptureFixture[str], arguments: list[str], meant: str
) -> None:
    status, out, err = run(capsys, *arguments)

    assert (status, out) == (2, "")
    assert err.startswith(f"kvtier: {meant}")
    assert err.count("\n") == 1


def test_a_beginning_of_an_option_and_a_value_like_an_option_are_none_of_these() -> None:
    options = build_parser().parse_args(["prove", "http://a", "--betw", "--x y", "--seed=4"])

    assert (options.between, options.seed) == ("--x y", 4)


@pytest.mark.parametrize(
    ("alias", "command"),
    [
        ("ls STORE", "store ls STORE"),
        ("list STORE", "store ls STORE"),
        ("store list STORE", "store ls STORE"),
        ("rm STORE --all", "store rm STORE --all"),
        ("store delete STORE --all", "store rm STORE --all"),
        ("verify STORE --json", "check STORE --json"),
        ("fsck STORE", "check STORE"),
        ("info STORE", "stats STORE"),
        ("docs list", "doc ls"),
        ("doc remove a b", "doc rm a b"),
        ("serve --model m --served-model-name n", "serve --model m --model-name n"),
        ("sidecar --host-memory 1GiB", "sidecar --host 1GiB"),
    ],
)
def test_an_alias_is_the_same_command(alias: str, command: str) -> None:
    parser = build_parser()

    assert parser.parse_args(alias.split()) == parser.parse_args(command.split())


def test_help_and_version_are_words_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "version") == run(capsys, "--version")
    assert run(capsys, "help") == run(capsys, "--help")
    assert run(capsys, "help", "store", "rm") == run(capsys, "store", "rm", "--help")


@pytest.mark.parametrize("model", [["gpt2"], ["--model", "gpt2"], ["gpt2", "--model", "gpt2"]])
def test_the_model_is_named_with_or_without_its_option(model: list[str]) -> None:
    assert model_of(build_parser().parse_args(["serve", "--port", "0", *model])) == "gpt2"


def test_a_pin_may_be_as_long_as_the_server_takes() -> None:
    assert MAX_DAYS * 86400 == MAX_PINNED_S


def test_a_key_that_no_header_can_say_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "doc", "ls", "--api-key", "sk-secret\n")

    assert (status, out) == (2, "")
    assert "secret" not in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("text", [b"", b"Hello.", b"The clerk wrote it down. " * 8, b"\xff\xfe\x00"])
def test_a_document_that_is_too_short_or_no_text_is_one_line_that_names_the_document(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: bytes
) -> None:
    document = tmp_path / "own.txt"
    document.write_bytes(text)

    status, out, err = run(capsys, "demo", "--document", document)

    *stages, last = err.splitlines()
    assert (status, out) == (2, "")
    assert last.startswith("kvtier: document")
    assert stages in ([], ["kvtier: loading torch and transformers", "kvtier: building the model"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "demo", "--device", "cuda")

    assert (status, out) == (2, "")
    assert "cuda" in err.splitlines()[-1].lower()
    assert err.splitlines()[:-1] == ["kvtier: loading torch and transformers", "kvtier: building the model"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
    ids=["by default", "unless it is set", "or said in another way"],
)
def test_torchs_threads_spin_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, str], expected: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    main(["stats", str(tmp_path / "none")])

    assert os.environ.get("GOMP_SPINCOUNT") == expected


@pytest.mark.parametrize(
    ("url", "is_told"),
    [
        ("redis://user:s3cret@cache:6379/0", True),
        ("redis+cluster://:s3cret@cache-0:6379,cache-1:6379", True),
        ("redis://user@cache:6379", False),
        ("s3://bucket/prefix", False),
    ],
)
def test_a_password_among_the_arguments_is_warned_of(
    url: str, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert remote_url(url) == url

    told = capsys.readouterr().err
    assert ("password_file" in told) == is_told
    assert "s3cret" not in told
