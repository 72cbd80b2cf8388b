"""The trip of one block, device to host to disk to host to device, as calls between files.

Run it with `python tests/support/block_trip.py`. The count is a hint at how much a reader has to open, for before and
after a change; no test holds it.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

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


class Trace:
    """Calls from one file of the rooms to another while it is entered."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

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
            if callee is not None and caller is not None and caller != callee:
                self.calls[caller, callee] += 1


def _file(frame: FrameType) -> str | None:
    """The file of the rooms that the frame runs, by its name below the root; None for any other."""
    path = Path(frame.f_code.co_filename).resolve()
    if not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT)
    return str(name) if name.parts[0] in ROOMS else None


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

        def forget_above_disk() -> None:
            world.evict_blocks(chain.names)
            assert cache.where(chain) == [Tier.DISK]

        legs = {"compute, commit, release": Trace().of(compute)}
        legs["spill to host and disk"] = Trace().of(world.flush)
        legs["evict"] = Trace().of(forget_above_disk)
        legs["look up, promote, release"] = Trace().of(fetch)
        assert cache.where(chain) == [Tier.DEVICE]
        world.check()
        return legs


def main() -> None:
    """Print the legs, and with --calls each pair of files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="which file calls which, and how often")
    with_calls = parser.parse_args().calls
    with tempfile.TemporaryDirectory() as folder:
        legs = trip(Path(folder) / "store")
    for name, trace in legs.items():
        print(f"{name:28} {len(trace.files):4} files {sum(trace.calls.values()):6} calls between them")
        if with_calls:
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
