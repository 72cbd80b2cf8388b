"""Which causal models of transformers load, and generate the same greedy tokens from every tier?

A small model with random weights of each type is built, and asked for the same prompt cold, from the device, from host
memory, from disk, after a restart, from a sidecar, and in a batch. --write renews their rows in `docs/models.md`. With
--images, the same is done with prompts with images, for each type of model that sees images.
"""

import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from engine_sidecar import started_sidecar
from family_coverage import Coverage, Outcome, cover, coverage_from, failed
from image_coverage import SEEING_TYPES, cover_images
from models_page import IMAGES_BEGIN, IMAGES_END, families_on, image_tables_of, tables_of, with_tables
from rich import box
from rich.console import Console
from rich.table import Table
from tiny_families import FAMILIES

from bench.report import Row, arguments, publish
from bench.rounds import never

EXAMINE = {"texts": cover, "images": cover_images}
QUICK = ("llama", "gemma3_text", "bert", "doge", "bloom")
PER_SIDECAR = 10  # families; each has up to three groups of layers, and a sidecar of 32 MiB memory for 32 of them
LIMIT_S = 300.0  # of one family, which takes three to ten seconds
MIN_EQUAL = 125


def main() -> int:
    """Compare the families; return 1 if one of them is wrong or failed."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--family", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--images", action="store_true", help="only prompts with images")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="renew the families' rows on this page")
    options = parser.parse_args()
    if (options.family or options.images) and options.json:
        parser.error("--json: the result is of all families, with texts; leave out --family and --images")
    known = SEEING_TYPES if options.images else FAMILIES
    families = options.family or (known if options.images else options.effort.of(FAMILIES, quick=QUICK))
    if unknown := [family for family in families if family not in known]:
        parser.error(f"--family: no {', '.join(unknown)}; use one of {', '.join(known)}")
    found = []
    for coverage in covered(families, options.workers, "images" if options.images else "texts"):
        found.append(coverage)
        print(f"{len(found)}/{len(families)} {in_words(coverage)}", file=sys.stderr, flush=True)
        if options.write is not None:
            (renew_images if options.images else renew)(options.write, coverage)
    found.sort(key=lambda coverage: coverage.family)
    if not options.json:
        print_table(found)
    if not options.family and not options.images:
        publish("model_coverage", rows_of(found), options.json)
    return int(any(coverage.outcome in (Outcome.WRONG, Outcome.FAILED) for coverage in found))


def renew(page: Path, coverage: Coverage) -> None:
    """Replace the family's row in the tables of the page. Rows of types that transformers no longer has are removed."""
    text = page.read_text()
    on_page = {each.family: each for each in families_on(text) if each.family in FAMILIES}
    page.write_text(with_tables(text, tables_of({**on_page, coverage.family: coverage}.values())))


def renew_images(page: Path, coverage: Coverage) -> None:
    """Replace the type's row in the page's tables of images, as `renew` does."""
    text = page.read_text()
    on_page = {each.family: each for each in families_on(text, IMAGES_BEGIN, IMAGES_END) if each.family in SEEING_TYPES}
    tables = image_tables_of({**on_page, coverage.family: coverage}.values())
    page.write_text(with_tables(text, tables, IMAGES_BEGIN, IMAGES_END))


def in_words(coverage: Coverage) -> str:
    """Return a line for one family."""
    faults = "; ".join(f"{way}: {fault}" for way, fault in coverage.faults.items())
    return f"{coverage.family}: {coverage.outcome} {coverage.reason or faults}".rstrip()


def rows_of(found: Sequence[Coverage]) -> list[Row]:
    """Return the counts, and the largest difference of a log probability."""
    counted = [coverage for coverage in found if coverage.is_counted and " with " not in coverage.family]
    equal = [coverage for coverage in counted if coverage.outcome is Outcome.EQUAL]
    outcomes = [coverage.outcome for coverage in found]
    return [
        Row("types that are no encoders and have an AttentionInterface", len(counted), ""),
        Row(
            "of these, token-equal from every tier",
            len(equal),
            "",
            f">= {MIN_EQUAL}",
            len(equal) >= MIN_EQUAL,
            varies=True,
        ),
        Row("of these, refused", sum(coverage.outcome is Outcome.REFUSED for coverage in counted), ""),
        Row("of these, not built by transformers", sum(each.outcome is Outcome.NOT_BUILT for each in counted), ""),
        never("families with another token, or from another tier", outcomes.count(Outcome.WRONG)),
        never("families that failed without a refusal", outcomes.count(Outcome.FAILED)),
        Row("largest difference of a log probability", max((each.error for each in found), default=0.0), ""),
    ]


def print_table(found: Sequence[Coverage]) -> None:
    """Print one line for each family."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("family", "", "layers", "difference", "ties", "why"):
        table.add_column(heading)
    for each in found:
        why = each.reason or "; ".join(f"{way}: {fault}" for way, fault in each.faults.items())
        error, ties = (f"{each.error:.0e}", str(each.num_ties)) if each.kinds else ("", "")
        table.add_row(each.family, each.outcome, ", ".join(each.kinds), error, ties, why)
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def covered(families: Sequence[str], num_workers: int, part: str) -> Iterator[Coverage]:
    """Yield the coverage of each family as it comes. A family that fails, hangs or ends its process costs that only.

    *part* is a key of EXAMINE.
    """
    with _workers(min(num_workers, len(families)), part) as workers:
        for start in range(0, len(families), PER_SIDECAR):
            with tempfile.TemporaryDirectory() as folder:
                socket = str(Path(folder) / "kvtier.sock")
                with started_sidecar(Path(folder), socket):
                    yield from _examined(families[start : start + PER_SIDECAR], workers, f"unix://{socket}")


def _examined(families: Sequence[str], workers: "Sequence[_Worker]", sidecar: str) -> Iterator[Coverage]:
    left = list(families)[::-1]
    while left or any(worker.family is not None for worker in workers):
        for worker in workers:
            if worker.family is None and left:
                worker.begin(left.pop(), sidecar)
        busy = [worker for worker in workers if worker.family is not None]
        wait([worker.connection for worker in busy], min(worker.left_s for worker in busy))
        yield from (coverage for worker in busy if (coverage := worker.ended()) is not None)


class _Worker:
    """A process that examines one family after the other, and is replaced if it ends or takes too long."""

    def __init__(self, part: str) -> None:
        self.family: str | None = None
        self._part = part
        self._give_up_at = 0.0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_work, args=(theirs, self._part))
        self._process.start()
        theirs.close()

    @property
    def left_s(self) -> float:
        """Seconds until the family has taken too long."""
        return max(0.0, self._give_up_at - time.monotonic())

    def begin(self, family: str, sidecar: str) -> None:
        """Examine the family in the worker process, with the sidecar at that URL."""
        self.family, self._give_up_at = family, time.monotonic() + LIMIT_S
        self.connection.send((family, sidecar))

    def ended(self) -> Coverage | None:
        """Return the coverage of the family if it is there; None while the process may go on with it."""
        family = self.family
        assert family is not None, "the worker has nothing to do"
        coverage: Coverage | None = None
        if self.connection.poll():
            try:
                coverage = coverage_from(self.connection.recv())
            except EOFError:
                coverage = failed(family, "its process ended")
        elif not self.left_s:
            coverage = failed(family, f"no end after {LIMIT_S:.0f} s")
        if coverage is not None:
            self.family = None
            if coverage.outcome is Outcome.FAILED:
                self.close()
                self._start()
        return coverage

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self.connection.close()


@contextmanager
def _workers(num_workers: int, part: str) -> Iterator[list[_Worker]]:
    workers = [_Worker(part) for _ in range(num_workers)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()


def _work(connection: Connection, part: str) -> None:
    """Examine the families that come through the connection, and send what becomes of each."""
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    while True:
        try:
            family, sidecar = connection.recv()
        except EOFError:
            return
        with tempfile.TemporaryDirectory() as folder:
            try:
                coverage = EXAMINE[part](family, Path(folder), sidecar)
            except Exception as error:  # of any code of a model: it is a row of the table
                coverage = failed(family, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        connection.send(asdict(coverage))


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(main())
