"""The blocks of code on pages, how each of them is tested, and the commands in them.

A comment on the line above a block says how the block is tested:

- `<!-- not run: needs Docker -->`: its commands are checked, and not run.
- `<!-- background: http://127.0.0.1:8000/health -->`: a server, which is ready when that address answers 200.
- `<!-- file: keys.toml -->`: not a command; the test saves the block in a file of that name.
"""

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LANGUAGES = ("bash", "console", "dockerfile", "ini", "json", "promql", "python", "sh", "text", "toml", "yaml")
NOT_RUN, BACKGROUND, FILE = "not run", "background", "file"

_FENCE = re.compile(
    r"(?m)^(?P<indent> *)(?P<fence>```+|~~~+)(?P<language>[^\n`]*)\n(?P<body>.*?)^ *(?P=fence) *$", re.S
)
_COMMENT = re.compile(r"^ *<!-- *([^:>]*?) *: *(.*?) *-->$")
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)")
_SEPARATORS = set("&|;()\n")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.S)
_BEFORE_COMMANDS = {"sudo", "nohup", "time", "exec", "if", "then", "else", "do", "while", "!", "{", "$"}
_QUOTING = ("docs/trip.md",)  # its blocks quote the source


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code on a page. *mark* and *said* are the two halves of the comment above it, or empty."""

    page: str
    line: int
    language: str
    text: str
    mark: str = ""
    said: str = ""

    @property
    def place(self) -> str:
        """Where the block is, as compilers write it."""
        return f"{self.page}:{self.line}"

    @property
    def is_shell(self) -> bool:
        """Whether the block holds commands for a shell."""
        return self.language == "sh"

    def commands(self) -> list[str]:
        """The commands of a shell block; one may have several lines."""
        return list(_commands_of(self.text))


def blocks_of(page: Path, root: Path) -> list[Block]:
    """The blocks of a page in order; *page* is below *root*."""
    text, name = page.read_text(), page.relative_to(root).as_posix()
    found = []
    for match in _FENCE.finditer(text):
        above = text[: match.start()].rstrip("\n").rpartition("\n")[2] if match.start() else ""
        is_close = text[: match.start()].endswith(f"{above}\n")  # no empty line between
        comment = _COMMENT.match(above) if is_close else None
        mark, said = comment.groups() if comment else ("", "")
        lines = match["body"].splitlines()
        body = "\n".join(line.removeprefix(match["indent"]) for line in lines) + "\n"
        number = text.count("\n", 0, match.start()) + 1
        found.append(Block(name, number, match["language"].strip(), body, mark, said))
    return found


def is_quoting(page: str) -> bool:
    """Whether the blocks of *page* are quotations from the source, which cannot run by themselves."""
    return page in _QUOTING


def calls_of(command: str) -> list[list[str]]:
    """The words of each program call in a command: `a | b && c` has three. Assignments before a call are left out."""
    lexer = shlex.shlex(_without_heredocs(command).replace("\\\n", " "), posix=True, punctuation_chars="();|&<>\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = "#"
    calls: list[list[str]] = [[]]
    is_target = False  # of a redirection
    for word in lexer:
        if set(word) <= _SEPARATORS:
            calls.append([])
        elif set(word) <= set("<>&"):
            if calls[-1] and calls[-1][-1].isdecimal():
                calls[-1].pop()
            is_target = True
        elif is_target:
            is_target = False
        elif not (not calls[-1] and (word in _BEFORE_COMMANDS or _ASSIGNMENT.fullmatch(word))):
            calls[-1].append(word)
    return [call for call in calls if call]


def _commands_of(text: str) -> Iterator[str]:
    """Split a script: a command ends with the first line after which the shell would run it."""
    lines: list[str] = []
    end_of_heredoc = None
    for line in text.splitlines():
        if not lines and (not line.strip() or line.lstrip().startswith("#")):
            continue
        lines.append(line)
        if end_of_heredoc is not None:
            if line.strip() != end_of_heredoc:
                continue
            end_of_heredoc = None
        elif heredoc := _HEREDOC.search(line):
            end_of_heredoc = heredoc[1]
            continue
        if not line.endswith("\\") and _is_complete("\n".join(lines)):
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def _is_complete(command: str) -> bool:
    return subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False).returncode == 0


def _without_heredocs(command: str) -> str:
    found = _HEREDOC.search(command)
    if found is None:
        return command
    first, _, rest = command.partition("\n")
    _, _, after = rest.partition(f"\n{found[1]}")
    return f"{first.replace(found[0], '')}{after}"
