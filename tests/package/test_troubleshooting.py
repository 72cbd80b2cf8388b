"""The messages that docs/troubleshooting.md shows: each is one that kvtier's code writes."""

import ast
import os
import re
from collections.abc import Iterator
from functools import cache

import pytest
from markdown_links import ROOT, examples_of

from kvtier.store.lmdb.data_file import capacity_within, index_bytes, slab_bytes

PAGE = ROOT / "docs" / "troubleshooting.md"
ROOMS = ("store", "transfer", "tiers", "engine", "connectors", "web", "server", "sidecar", "routing", "cli")
MIN_LITERAL = 16  # characters of a message outside its values: a shorter pattern would match almost any line
MIN_NESTED_WORDS = 5  # a value with so many words is a message too


def messages() -> list[str]:
    """Return the messages on the page. A line that begins with two spaces continues the line above."""
    blocks = examples_of(PAGE, "text")
    return [line for block in blocks for line in re.sub(r"\n  +", " ", block).splitlines() if line]


def texts_in(tree: ast.AST) -> Iterator[list[str]]:
    """Yield the literal parts of each text in *tree*; values stand between two parts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [""]
            for value in node.values:
                if isinstance(value, ast.Constant):
                    parts[-1] += str(value.value)
                else:
                    parts.append("")
            yield parts
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.split(r"%[\d.,]*[sdgfr]|%\.\d+e", node.value)


@cache
def patterns() -> list[re.Pattern[str]]:
    """Return a pattern for each text in the code that is long enough to be a message."""
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    texts = [parts for file in files for parts in texts_in(ast.parse(file.read_text()))]
    return [re.compile("(.*)".join(map(re.escape, parts))) for parts in texts if sum(map(len, parts)) >= MIN_LITERAL]


def is_written(message: str) -> bool:
    """Return whether the code writes *message*, and each longer message that stands in it as a value."""
    if (system := re.fullmatch(r"\[Errno (\d+)\] (.*)", message)) and system[2] == os.strerror(int(system[1])):
        return True
    bare = re.sub(r"^\[Errno \d+\] (.*?)(: '.*')?$", r"\1", message)  # as Python shows an OSError with a path
    bare = bare.removeprefix("lmcache: ")  # the sidecar's log names the endpoint before a refusal
    for pattern in patterns():
        if match := pattern.fullmatch(bare):
            nested = [value for value in match.groups() if len(value.split()) >= MIN_NESTED_WORDS]
            if all(value != bare and is_written(value) for value in nested):
                return True
    return False


@pytest.mark.parametrize("message", messages())
def test_each_message_on_the_page_is_written_by_the_code(message: str) -> None:
    assert is_written(message)


@pytest.mark.parametrize(
    "message",
    [
        "store /var/lib/kvtier is empty: the machine went down while it was open",
        "disk: /var/lib/kvtier is not open (folder /var/lib/kvtier is used by process 4711; end it);"
        " serving without it, trying again",
    ],
)
def test_a_message_that_the_code_does_not_write_is_noticed(message: str) -> None:
    assert not is_written(message)


SIZES = ["100 MiB", "1 GiB", "10 GiB", "100 GiB"]


def in_bytes(size: str) -> float:
    number, unit = size.split()
    return float(number) * {"MiB": 1 << 20, "GiB": 1 << 30}[unit]


@pytest.mark.parametrize("size", SIZES)
def test_the_page_says_how_much_of_a_disk_is_for_blocks_reserve_and_index(size: str) -> None:
    (row,) = re.findall(rf"^\| {size} \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)

    capacity = capacity_within(round(in_bytes(size)))

    parts = [capacity, slab_bytes(capacity) - capacity, index_bytes(capacity)]
    assert [in_bytes(cell) for cell in row] == pytest.approx(parts, rel=0.06)
