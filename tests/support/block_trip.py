"""The trip of one block, device to host to disk to host to device, as calls between files.

Run it with `python tests/support/block_trip.py`. The count is a hint at how much a reader has to open, for before and
after a change; no test holds it. With `--functions` it prints what a reader has to read: the functions that the trip
passes, in the order of their first calls, with their lines of code.
"""

import argparse
import ast
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from types import FrameType
from typing import TypeGuard

from chaos import World

from kvtier import tiers
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.tier import Tier

ROOT = Path(tiers.__file__).resolve().parents[1]  # where the rooms are that run, be it a copy of them
BELOW = ("tiers/lower/", "store/")  # what stands behind `LowerTiers`
ROOMS = ("engine", "store", "tiers", "transfer")
BLOCK_SIZE = 4
PROMPT = BLOCK_SIZE + 1  # tokens: one full block, and the one that is always left to compute


@dataclass(frozen=True)
class Function:
    """A function of the rooms, or a method, with what is nested in it."""

    file: str
    name: str  # with its class
    num_lines: int  # of code: no docstring, no comment, no blank line

    @property
    def is_below(self) -> bool:
        """Whether it stands behind the seam."""
        return self.file.startswith(BELOW)


class Trace:
    """Functions that are called while it is entered, and calls from one file of the rooms to another."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.functions: dict[Function, None] = {}  # in the order of their first calls

    @property
    def files(self) -> set[str]:
        """All files that were called, or called."""
        return {file for pair in self.calls for file in pair}

    def of(self, act: Callable[[], object]) -> "Trace":
        """Trace what *act* does."""
        sys.setprofile(self._note)
        try:
            act()
        finally:
            sys.setprofile(None)
        return self

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_back is not None:
            caller, callee = _file(frame.f_back), _file(frame)
            if callee is None:
                return
            if caller is not None and caller != callee:
                self.calls[caller, callee] += 1
            if (function := _functions(callee).get(frame.f_code.co_firstlineno)) is not None:
                self.functions[function] = None


def _file(frame: FrameType) -> str | None:
    """The file of the rooms that the frame runs, by its name below the root; None for any other."""
    path = Path(frame.f_code.co_filename).resolve()
    if not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT)
    return str(name) if name.parts[0] in ROOMS else None


@once
def _functions(file: str) -> Mapping[int, Function]:
    """The functions of a file of the rooms, by each of their lines."""
    text = (ROOT / file).read_text()
    lines = text.splitlines()
    found: dict[int, Function] = {}
    for name, node in _definitions(ast.parse(text), ""):
        own = _lines(node)
        docstrings = [row for each in ast.walk(node) if _has_docstring(each) for row in _lines(each.body[0])]
        code = [row for row in own if row not in docstrings and lines[row - 1].strip()[:1] not in ("", "#")]
        found.update(dict.fromkeys(own, Function(file, name, len(code))))
    return found


def _lines(node: ast.stmt) -> range:
    """From its first decorator to its end."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return range(min(each.lineno for each in (node, *decorators)), (node.end_lineno or node.lineno) + 1)


def _has_docstring(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods, but for those inside others."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")


def functions(legs: Mapping[str, Trace]) -> list[Function]:
    """What the whole trip passes, in the order of the first calls."""
    return list(dict.fromkeys(function for trace in legs.values() for function in trace.functions))


def trip(folder: Path) -> dict[str, Trace]:
    """Each leg of the trip, traced."""
    with LmdbStore(folder, 1 << 20) as store:
        world = World([FullAttention(BLOCK_SIZE)], [64], 8, 8, store, random.Random(1), partial_blocks=False)
        cache, chain = world.cache, world.chain("a", BLOCK_SIZE)

        def compute() -> None:
            tables = cache.allocate([1])
            assert tables is not None
            world.compute(tables, chain, 0, BLOCK_SIZE)
            cache.release(tables)

        def fetch() -> None:
            promotion = cache.promote(cache.lookup(chain, PROMPT))
            world.settle()
            cache.release(promotion.tables)

        legs = {"compute, commit, release": Trace().of(compute)}
        legs["spill to host and disk"] = Trace().of(world.flush)
        legs["evict"] = Trace().of(lambda: world.evict_blocks(chain.names))
        assert cache.lookups.where(chain) == [Tier.DISK]
        legs["look up, promote, release"] = Trace().of(fetch)
        assert cache.lookups.where(chain) == [Tier.DEVICE]
        world.check()
        return legs


def print_functions(legs: Mapping[str, Trace]) -> None:
    """The functions of the trip, and how many lines of code they have on each side of the seam."""
    passed = functions(legs)
    for function in passed:
        print(f"{function.num_lines:5} {function.file}: {function.name}")
    for side, is_below in (("above the seam", False), ("below it", True)):
        own = [function for function in passed if function.is_below == is_below]
        print(f"{side:28} {len(own):4} functions {sum(function.num_lines for function in own):6} lines of code")


def main() -> None:
    """Print the legs, and with --calls each pair of files; or the functions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="which file calls which, and how often")
    parser.add_argument("--functions", action="store_true", help="which functions it passes, and their lines of code")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        legs = trip(Path(folder) / "store")
    if chosen.functions:
        print_functions(legs)
        return
    for name, trace in legs.items():
        print(f"{name:28} {len(trace.files):4} files {sum(trace.calls.values()):6} calls between them")
        if chosen.calls:
            for (caller, callee), count in sorted(trace.calls.items(), key=lambda item: -item[1]):
                print(f"    {count:4} {caller} > {callee}")
    files = set[str]().union(*(trace.files for trace in legs.values()))
    num_calls = sum(sum(trace.calls.values()) for trace in legs.values())
    print(f"{'the whole trip':28} {len(files):4} files {num_calls:6} calls between them")
    for side, is_below in (("above the seam", False), ("below it", True)):
        own = {file for file in files if file.startswith(BELOW) == is_below}
        calls = [trace.calls for trace in legs.values()]
        num_inside = sum(n for each in calls for (one, other), n in each.items() if {one, other} <= own)
        print(f"{side:28} {len(own):4} files {num_inside:6} calls between them")


if __name__ == "__main__":
    main()
