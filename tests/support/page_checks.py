"""Checks of the commands on pages that start nothing: options, modules, files, extras and targets must exist.

`python tests/support/page_checks.py` prints how many blocks and commands each page has, and how they are tested.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.util
import io
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from markdown_links import ROOT, code_of, pages
from page_blocks import NOT_RUN, Block, blocks_of, calls_of, is_quoting

from kvtier.cli.arguments import OneLineParser
from kvtier.cli.main import build_parser

# What these programs do is tested elsewhere, or changes the machine: pages' tests never run them.
_ONLY_CHECKED = ("pip", "make", "apt", "apt-get", "pytest", "git", "bench", "venv", "activate")
_PLACEHOLDER = re.compile(r"[A-Z_]+|.*…|.*\.\.\.|\$.*")


def blocks_with_commands(page: str) -> list[Block]:
    """The blocks of *page* that hold commands."""
    return [] if is_quoting(page) else [block for block in blocks_of(ROOT / page, ROOT) if block.is_shell]


def is_only_checked(command: str) -> bool:
    """Whether a command is never run: an installation, a make target, a test or a benchmark."""
    return command == "cd kvtier" or any(_program_of(call) in _ONLY_CHECKED for call in calls_of(command))


def faults_of_command(command: str) -> list[str]:
    """Why a command cannot be right, as far as that can be told without running it."""
    try:
        calls = calls_of(command)
    except ValueError as error:
        return [f"{command}: {error}"]
    return [f"{' '.join(call)}: {fault}" for call in calls for fault in _faults_of_call(call)]


def faults_of_python(block: Block) -> list[str]:
    """Names that a block imports and that its packages do not have. Packages that are not installed are passed over."""
    faults = []
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            faults += [alias.name for alias in node.names if not _has_module(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            if not _has_module(node.module):
                faults.append(node.module)
            elif importlib.util.find_spec(node.module.partition(".")[0]) is not None:
                module = importlib.import_module(node.module)
                names = [alias.name for alias in node.names]
                faults += [
                    name for name in names if not hasattr(module, name) and not _has_module(f"{node.module}.{name}")
                ]
    return [f"{block.place}: there is no {name}" for name in faults]


def faults_of_mentions(page: str) -> list[str]:
    """Mentions of commands in the sentences of *page* with a command or an option that does not exist."""
    found = [code for code in code_of(ROOT / page) if code.startswith("kvtier ")]
    return [f"{page}: `{code}`: {fault}" for code in found for fault in _faults_of_mention(code.split()[1:])]


def counts_of(page: str) -> Counter[str]:
    """How many commands of *page* are run, checked only, and marked as not run."""
    counts: Counter[str] = Counter()
    for block in blocks_with_commands(page):
        for command in block.commands():
            kind = "marked" if block.mark == NOT_RUN else "checked" if is_only_checked(command) else "run"
            counts[kind] += 1
    return counts


@functools.cache
def _parser() -> argparse.ArgumentParser:
    return build_parser()


def _program_of(call: Sequence[str]) -> str:
    words = call[1:] if call[0] in (".", "source") and len(call) > 1 else call
    name = words[0].rpartition("/")[2]
    if re.fullmatch(r"python[\d.]*", name) and len(call) > 2 and call[1] == "-m":
        return call[2].partition(".")[0]
    return re.sub(r"[\d.]+$", "", name)


def _faults_of_call(call: Sequence[str]) -> Iterator[str]:
    program, arguments = _program_of(call), list(call[1:])
    if re.fullmatch(r"python[\d.]*", call[0].rpartition("/")[2]):
        yield from _faults_of_script(arguments)
        arguments = arguments[2:] if arguments[:1] == ["-m"] else arguments
    if program == "kvtier":
        yield from _faults_of_arguments(arguments)
    elif program == "make":
        targets = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        yield from (f"there is no target {word}" for word in arguments if "=" not in word and word not in targets)
    elif program == "pytest":
        paths = [word for word in arguments if "/" in word and not word.startswith("-")]
        yield from (f"there is no {path}" for path in paths if not (ROOT / path.partition("::")[0]).exists())
    elif program == "pip":
        yield from _faults_of_extras(" ".join(arguments))
    elif program == "curl":
        yield from _faults_of_body(arguments)
    elif "/" in call[0] and not call[0].startswith(("/", "~", ".venv", "$")) and not (ROOT / call[0]).exists():
        yield f"there is no file {call[0]}"


def _faults_of_arguments(arguments: Sequence[str]) -> Iterator[str]:
    """What our own parser says of the arguments of `kvtier`."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            _parser().parse_args(arguments)
        except SystemExit as left:
            if left.code not in (0, None):
                yield said.getvalue().strip()


def _faults_of_mention(words: Sequence[str]) -> Iterator[str]:
    """A mention in a sentence may lack arguments, so only the names of commands and options are looked up."""
    parser = _parser()
    for word in words:
        commands = parser.commands.choices if isinstance(parser, OneLineParser) and parser.commands else {}
        if word in commands:
            parser = commands[word]
        elif commands and not word.startswith("-") and not _PLACEHOLDER.fullmatch(word):
            yield f"there is no command {word}"
            return
        elif word.startswith("--"):
            option = word.partition("=")[0].rstrip(",;")
            known = {name for action in parser._actions for name in action.option_strings}
            if option not in known:
                yield f"there is no option {option}"


def _faults_of_script(arguments: Sequence[str]) -> Iterator[str]:
    """A module or a file that Python shall run. Modules of packages that are not installed here are passed over."""
    if arguments[:1] == ["-m"]:
        module = arguments[1]
        paths = [ROOT / f"{module.replace('.', '/')}{end}" for end in (".py", "/__main__.py")]
        if module.partition(".")[0] in ("bench", "kvtier") and not any(path.is_file() for path in paths):
            yield f"there is no module {module}"
    elif arguments and arguments[0].endswith(".py") and "/" in arguments[0] and not (ROOT / arguments[0]).is_file():
        yield f"there is no file {arguments[0]}"


def _faults_of_extras(arguments: str) -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [name.strip() for names in re.findall(r"(?:^|\s)\.\[([^\]]*)\]", arguments) for name in names.split(",")]
    yield from (f"there is no extra {name}" for name in named if name not in project["optional-dependencies"])


def _faults_of_body(arguments: Sequence[str]) -> Iterator[str]:
    for flag, value in pairwise(arguments):
        if flag in ("-d", "--data", "--json") and value.startswith("{") and "$" not in value:
            try:
                json.loads(value)
            except ValueError as error:
                yield f"its body is no JSON ({error})"


def _has_module(name: str) -> bool:
    top = name.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        return top not in ("kvtier", "bench")
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def main() -> int:
    """Print the counts of all pages."""
    total: Counter[str] = Counter()
    for path in pages():
        page = path.relative_to(ROOT).as_posix()
        counts = counts_of(page)
        total += counts
        if counts:
            print(f"{page:44} {counts['run']:4} run {counts['checked']:4} checked {counts['marked']:4} marked")
    print(f"{'all':44} {total['run']:4} run {total['checked']:4} checked {total['marked']:4} marked")
    marked = [block for path in pages() for block in blocks_with_commands(path.relative_to(ROOT).as_posix())]
    for block in marked:
        if block.mark == NOT_RUN:
            print(f"not run: {block.place}: {block.said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
