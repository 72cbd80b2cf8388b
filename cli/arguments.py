"""Argument parsing shared by all commands: the format of help, one-line errors, and functions that parse values."""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from kvtier.engine.config import HOST_NAME, parse_bytes

MODELS = "a causal LM that transformers can load: a folder, a GGUF file, a hub id, or smollm2 (in kvtier[real])"


class HelpFormatter(argparse.HelpFormatter):
    """A formatter that wraps descriptions to the terminal's width and keeps the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports a bad argument in one line, without the usage text that --help prints.

    Unknown commands and options are reported first, with the closest known name. Otherwise argparse would report a
    mistyped option as a missing required option.
    """

    commands: "argparse._SubParsersAction[Any] | None" = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Create a parser. Its arguments are those of `argparse.ArgumentParser`."""
        super().__init__(*args, **settings)
        # Values such as -3GiB count as values, too, not only plain negative numbers. So the function that parses the
        # value reports it. Otherwise argparse would say that the value is missing.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def add_subparsers(self, **settings: Any) -> "argparse._SubParsersAction[Any]":
        """Add subparsers, and remember them in `commands`, so that unknown commands can be reported."""
        self.commands = super().add_subparsers(**settings)
        return self.commands

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Report unknown commands and options, then parse.

        argparse calls this method for each command, with the arguments after the command's name.
        """
        given = sys.argv[1:] if args is None else list(args)
        self._check_words(given)
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        """Print *message* on one line and exit with status 2."""
        end = "" if message.endswith("?") else ";"
        self.exit(2, f"kvtier: {message}{end} see {self.prog} --help\n")

    def _check_words(self, arguments: Sequence[str]) -> None:
        own = list(arguments if self.commands is None else takewhile(lambda each: each.startswith("-"), arguments))
        options = {option: option for option in self._option_string_actions}
        for word in _long_options(own):
            if not any(option.startswith(word) for option in options):  # argparse accepts a unique prefix
                self.error(f"{word}: no such option{_meant(word, options)}")
        if self.commands is not None and len(own) < len(arguments):
            word, known = arguments[len(own)], self.commands.choices
            if word not in known:
                self.error(f"{word}: no such command{_meant(word, dict(_paths(known, self.prog)))}")


def _long_options(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the names of the long options in *arguments*.

    Arguments after `--` and arguments with a space are not options.
    """
    for argument in arguments:
        if argument == "--":
            return
        if argument.startswith("--") and " " not in argument:
            yield argument.partition("=")[0]


def _paths(commands: Mapping[str, argparse.ArgumentParser], prog: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of a command's name and its full form, such as `rm` and `kvtier store rm`, subcommands first."""
    for parser in commands.values():
        if isinstance(parser, OneLineParser) and parser.commands is not None:
            yield from _paths(parser.commands.choices, parser.prog)
    yield from ((name, f"{prog} {name}") for name in commands)


def _meant(word: str, known: Mapping[str, str]) -> str:
    """Return "; did you mean X?" for the known name that is closest to *word*, or "" if no name is close.

    *known* maps each name to the text X to suggest. A name that is longer than *word* is also compared by its
    beginning.
    """
    beginnings = {name[: len(word)]: meant for name, meant in known.items()}
    near = get_close_matches(word, choices := {**beginnings, **known}, n=1)
    return f"; did you mean {choices[near[0]]}?" if near else ""


def nonempty_text(text: str) -> str:
    """Return *text*, the value of an option. Reject an empty value."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give it a value, or leave the option out")
    return text


def utf8_text(text: str) -> str:
    """Return *text*, an option value that is sent to a server. Reject an empty value and invalid UTF-8."""
    try:
        nonempty_text(text).encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is not UTF-8 text") from None
    return text


def add_allowed_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the option `--allow-host`. Its values become `options.allowed_hosts`, or None if it is not given."""
    parser.add_argument(
        "--allow-host",
        action="append",
        dest="allowed_hosts",
        type=_host_name,
        metavar="NAME",
        help="host name that clients may use in the server's URL, such as a proxy's name. *.NAME allows all names that "
        "end in .NAME. The option may be repeated. IP addresses and localhost are always allowed. Local names such as "
        "gpu7 or gpu7.local are allowed unless --host is a loopback address. A server with API keys allows every name "
        "(default: none)",
    )


def _host_name(text: str) -> str:
    """Return *text* if it is a host name, `*.DOMAIN` for all names in a domain, or `*` for any name."""
    if not re.fullmatch(HOST_NAME, text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a host name; omit scheme and port, for example kv.example")
    return text


def remote_url(text: str) -> str:
    """Return *text*, the URL of a remote store. Warn if it has a password, because other users can see it."""
    credentials, at, _ = nonempty_text(text).partition("://")[2].rpartition("@")
    if at and ":" in credentials:
        print(
            "kvtier: warning: other users of this machine can see the password in the store's URL on the command "
            "line; put the password into a file (password_file in [remote], --password-file)",
            file=sys.stderr,
        )
    return text


def path(text: str) -> Path:
    """Return the path of a file or folder, with `~` expanded."""
    return Path(nonempty_text(text)).expanduser()


def size(text: str) -> int:
    """Return the number of bytes that *text* denotes, such as 8GiB."""
    try:
        return int(parse_bytes(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def folder_and_size(text: str) -> dict[str, object]:
    """Convert PATH:SIZE, the value of `--disk`, to the configuration table `[disk]`."""
    folder, colon, capacity = text.rpartition(":")
    if not colon or not folder:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATH:SIZE, such as ~/.cache/kvtier:500GiB")
    return {"path": folder, "capacity": size(capacity)}
