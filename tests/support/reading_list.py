"""The reading list of docs/structure.md: `python tests/support/reading_list.py` counts the lines of its files anew."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "structure.md"

_ROW = re.compile(r"\| `([\w/.]+\.py)` \| ([\d,]+) \|")
_SUM = re.compile(r"\| all (\d+) files \| ([\d,]+) \|")


def said_lines() -> dict[str, int]:
    """Lines by file, as the page has them."""
    return {path: _number(lines) for path, lines in _ROW.findall(PAGE.read_text())}


def said_sum() -> tuple[int, int]:
    """Files and lines in all, as the page has them."""
    ((files, lines),) = _SUM.findall(PAGE.read_text())
    return int(files), _number(lines)


def count_lines(path: str) -> int:
    """Lines of a file; 0 if it is not there."""
    return len((ROOT / path).read_text().splitlines()) if (ROOT / path).exists() else 0


def counted_page() -> str:
    """The page with the numbers as they are now."""
    counted = {path: count_lines(path) for path in said_lines()}
    page = _ROW.sub(lambda row: f"| `{row[1]}` | {counted[row[1]]:,} |", PAGE.read_text())
    return _SUM.sub(f"| all {len(counted)} files | {sum(counted.values()):,} |", page)


def _number(text: str) -> int:
    return int(text.replace(",", ""))


if __name__ == "__main__":
    PAGE.write_text(counted_page())
