"""The documents that people read, and what they link to and name."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(```+|~~~+)(\w*)[^\n]*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_REFERENCE = re.compile(r"\[([^\]]*)\]\[([^\]\n]*)\]")
_DEFINITION = re.compile(r"^ {0,3}\[([^\]\n]+)\]: +(\S+)", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Link:
    """A link to a file of the repository, and to a heading in it if *anchor* is not empty."""

    file: Path
    anchor: str


def pages() -> list[Path]:
    """Return the documents: README, DESIGN and others at the top, and all in `docs/` and `examples/`."""
    return [path for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md") for path in sorted(ROOT.glob(pattern))]


class _SiteLoader(yaml.SafeLoader):
    """A loader of mkdocs.yml in which values from the environment are empty."""


_SiteLoader.add_constructor("!ENV", lambda loader, node: "")


def site_titles() -> list[tuple[str, str]]:
    """Return each page of the site's navigation with its title, in order."""
    return list(_entries(yaml.load((ROOT / "mkdocs.yml").read_text(), _SiteLoader)["nav"]))


def _entries(navigation: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for entry in navigation:
        for title, below in entry.items():
            yield from [(below, title)] if isinstance(below, str) else _entries(below)


def links_of(page: Path) -> list[Link]:
    """Return the relative links of *page*, inline or by reference, except those in examples of code."""
    text = _text_of(page)
    found = [*_LINK.findall(text), *definitions_of(page).values()]
    targets = [target for target in found if not re.match(r"[a-z]+:", target)]
    split = [target.partition("#") for target in targets]
    return [Link((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in split]


def definitions_of(page: Path) -> dict[str, str]:
    """Return the targets of the links by reference (`[text][name]`) of *page*, by name in lower case."""
    return {name.lower(): target for name, target in _DEFINITION.findall(_text_of(page))}


def references_of(page: Path) -> set[str]:
    """Return the names that links by reference on *page* use, in lower case; `[name][]` uses its text."""
    return {(name or " ".join(text.split())).lower() for text, name in _REFERENCE.findall(_text_of(page))}


def anchors_of(page: Path) -> set[str]:
    """The anchors of the headings of *page*, by GitHub's rule: lower case, no punctuation, a hyphen for each blank."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_of(page: Path) -> list[str]:
    """What stands between backticks in the sentences of *page*."""
    return _CODE.findall(_FENCE.sub("", page.read_text()))


def _text_of(page: Path) -> str:
    """The text of *page* without examples of code, and without what stands between backticks."""
    return _CODE.sub("", _FENCE.sub("", page.read_text()))


def examples_of(page: Path, language: str) -> list[str]:
    """The blocks of code of *page* in *language* ("" for those that name none)."""
    return [body for _, named, body in _FENCE.findall(page.read_text()) if named == language]
