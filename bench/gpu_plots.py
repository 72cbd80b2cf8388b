"""Draws the figures of gpu_copies and gpu_serving: `python -m bench.gpu_plots FOLDER`, which has their JSON files."""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]  # as in the JSON files
Lines = dict[str, dict[float, float]]
KIB = {"KiB": 1, "MiB": 1024}
DPI = 120


def plot(rows: Rows, folder: Path) -> list[Path]:
    """Draw all plots for which *rows* have figures, and return the files. Without matplotlib one line says so."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plots: matplotlib is not installed (pip install 'kvtier[bench]')", file=sys.stderr)
        return []
    mpl.use("Agg")  # there is no display
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    if lines := copy_lines(rows):
        files.append(_lines(lines, folder / "copies.png", "scattered blocks", "KiB a block", "GB/s", is_log=False))
    if lines := ttft_lines(rows):
        files.append(_lines(lines, folder / "ttft.png", "time to first token", "tokens of prefix", "ms", is_log=True))
    if bars := decode_bars(rows):
        files.append(_bars(bars, folder / "decoding.png", "decoding while blocks are pushed out", "tokens/s"))
    return files


def copy_lines(rows: Rows) -> Lines:
    """GB/s by the block's size in KiB: of the plain copy and of kvtier's, up and down."""
    lines: Lines = defaultdict(dict)
    for row in rows:
        found = re.fullmatch(r"(\d+) (KiB|MiB) (up|down): (plain pinned copy|chosen, scattered)", row["name"])
        if found and row["unit"] == "GB/s":
            line = f"{'H2D' if found[3] == 'up' else 'D2H'}, {found[4]}"
            lines[line][int(found[1]) * KIB[found[2]]] = row["value"]
    return lines


def ttft_lines(rows: Rows) -> Lines:
    """Milliseconds to the first token by prefix length, for each tier and way to load."""
    lines: Lines = defaultdict(dict)
    for row in rows:
        found = re.fullmatch(r"(cold|device|host|disk) TTFT, (\d+)(k?)((?:, .*)?)", row["name"])
        if found and row["unit"] == "ms":
            lines[found[1] + found[4]][int(found[2]) * (1024 if found[3] else 1)] = row["value"]
    return lines


def decode_bars(rows: Rows) -> dict[str, float]:
    """Tokens a second that each engine decodes."""
    return {row["name"].removeprefix("decode, "): row["value"] for row in rows if _is_decoding(row)}


def _is_decoding(row: Mapping[str, Any]) -> bool:
    return bool(row["name"].startswith("decode, ") and row["unit"] == "tokens/s")


def _lines(lines: Lines, file: Path, title: str, along: str, unit: str, is_log: bool) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, points in lines.items():
        axes.plot(list(points), list(points.values()), marker="o", label=name)
    places = sorted({place for points in lines.values() for place in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,.0f}" for place in places])
    if is_log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel=along, ylabel=unit)
    axes.grid(alpha=0.3)
    axes.legend()
    return _saved(figure, file)


def _bars(bars: Mapping[str, float], file: Path, title: str, unit: str) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 4))
    axes.bar_label(axes.bar(list(bars), list(bars.values())), fmt="%.0f")
    axes.set(title=title, ylabel=unit)
    return _saved(figure, file)


def _saved(figure: Any, file: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(file, dpi=DPI)
    pyplot.close(figure)
    return file


def main() -> None:
    folder = Path(sys.argv[1])
    rows = [row for file in sorted(folder.glob("*.json")) for row in json.loads(file.read_text())["rows"]]
    for file in plot(rows, folder):
        print(file)


if __name__ == "__main__":
    main()
