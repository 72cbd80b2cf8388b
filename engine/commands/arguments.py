"""What the arguments of all commands share: how help looks, how a mistake is said, and what a value may be."""

import argparse
from typing import NoReturn


class HelpFormatter(argparse.HelpFormatter):
    """Wraps a description to the terminal's width, and leaves the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in the arguments in one line, without the usage, which --help prints."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"kvtier: {message}; see {self.prog} --help\n")


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
