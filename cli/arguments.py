"""What the arguments of all commands share: how help looks, how a mistake is said, and what a value may be."""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from kvtier.engine.config import HOST_NAME, parse_bytes

MODELS = "a causal LM that transformers loads: a folder, a GGUF file, a hub id, or smollm2 (in kvtier[real])"


class HelpFormatter(argparse.HelpFormatter):
    """Wraps a description to the terminal's width, and leaves the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in the arguments in one line, without the usage, which --help prints.

    A word that is no command, and an option that is none, are told before anything else, with what may be meant: of a
    mistyped option argparse says first that the option which it was meant for is missing.
    """

    commands: "argparse._SubParsersAction[Any] | None" = None

    def add_subparsers(self, **settings: Any) -> "argparse._SubParsersAction[Any]":
        """As argparse's; the parser keeps what it gives."""
        self.commands = super().add_subparsers(**settings)
        return self.commands

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, which calls it for each command with the arguments behind its name."""
        given = sys.argv[1:] if args is None else list(args)
        self._check_words(given)
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        """End the process with *message* on one line."""
        end = "" if message.endswith("?") else ";"
        self.exit(2, f"kvtier: {message}{end} see {self.prog} --help\n")

    def _check_words(self, arguments: Sequence[str]) -> None:
        own = list(arguments if self.commands is None else takewhile(lambda each: each.startswith("-"), arguments))
        options = {option: option for option in self._option_string_actions}
        for word in _long_options(own):
            if not any(option.startswith(word) for option in options):  # a beginning is enough
                self.error(f"{word}: no such option{_meant(word, options)}")
        if self.commands is not None and len(own) < len(arguments):
            word, known = arguments[len(own)], self.commands.choices
            if word not in known:
                self.error(f"{word}: no such command{_meant(word, dict(_paths(known, self.prog)))}")


def _long_options(arguments: Sequence[str]) -> Iterator[str]:
    """Those of the *arguments* that can only be options: before a `--`, without a blank, up to a `=`."""
    for argument in arguments:
        if argument == "--":
            return
        if argument.startswith("--") and " " not in argument:
            yield argument.partition("=")[0]


def _paths(commands: Mapping[str, argparse.ArgumentParser], prog: str) -> Iterator[tuple[str, str]]:
    """Name and whole command of all *commands* and of those below them, the nearest last."""
    for parser in commands.values():
        if isinstance(parser, OneLineParser) and parser.commands is not None:
            yield from _paths(parser.commands.choices, parser.prog)
    yield from ((name, f"{prog} {name}") for name in commands)


def _meant(word: str, known: Mapping[str, str]) -> str:
    """A question after what *word*, or what it begins, is near to; or nothing."""
    beginnings = {name[: len(word)]: meant for name, meant in known.items()}
    near = get_close_matches(word, choices := {**beginnings, **known}, n=1)
    return f"; did you mean {choices[near[0]]}?" if near else ""


def some_text(text: str) -> str:
    """The value of an option, which must not be empty."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give it a value, or leave the option out")
    return text


def sent_text(text: str) -> str:
    """The same of an option that is sent to a server, in UTF-8: a file's name may be other bytes, this must not."""
    try:
        some_text(text).encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is no text in UTF-8") from None
    return text


def add_allowed_hosts(parser: argparse.ArgumentParser) -> None:
    """Add `--allow-host`, whose values become `allowed_hosts`; None if it is not given."""
    parser.add_argument(
        "--allow-host",
        action="append",
        dest="allowed_hosts",
        type=_host_name,
        metavar="NAME",
        help="without API keys: a host name by which clients reach the server, such as a proxy's; *.NAME allows all "
        "names below it; may be repeated (default: none; IP addresses and localhost are always allowed, and unless the "
        "server listens on a loopback address also names that public DNS cannot have)",
    )


def _host_name(text: str) -> str:
    """Return the name of a host, or `*.` and what names end in, or `*`."""
    if not re.fullmatch(HOST_NAME, text):
        raise argparse.ArgumentTypeError(f"{text!r} is no host name; give one without scheme and port: kv.example")
    return text


def remote_url(text: str) -> str:
    """The value of `--remote`. Warns of a password in it, which every user of the machine can read there."""
    credentials, at, _ = some_text(text).partition("://")[2].rpartition("@")
    if at and ":" in credentials:
        print(
            "kvtier: warning: other users of this machine can read the password in the store's URL, because they can "
            "see arguments; put it into a file (password_file in [remote], --password-file)",
            file=sys.stderr,
        )
    return text


def path(text: str) -> Path:
    """The value of an option or argument that names a file or folder; `~` is expanded."""
    return Path(some_text(text)).expanduser()


def size(text: str) -> int:
    """The value of an option that is a number of bytes, such as 8GiB."""
    try:
        return int(parse_bytes(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def folder_and_size(text: str) -> dict[str, object]:
    """The value of `--disk`, PATH:SIZE, as the table `[disk]`."""
    folder, colon, capacity = text.rpartition(":")
    if not colon or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATH:SIZE, such as ~/.cache/kvtier:500GiB")
    return {"path": folder, "capacity": size(capacity)}
