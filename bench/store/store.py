"""Is the disk tier as fast as the disk, and kind to it?

Blocks of four sizes go in and out of a store at capacity, next to a raw file as large. Each figure is a ratio of works
done in turn, in random order. A batch of writes has 8 MiB, a prompt; a request reads 16 MiB, two prompts. "Cold" means
that the guest's page cache was emptied and the store opened after that; the host may still have the bytes. Reads are
verified, writes compute the digests. "inline" is the store in this process, "child" the one in a process of its own.
"""

import gc
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from bench.report import Row, publish
from bench.rounds import MIB, Choice, Side, Work, alternate, at_least, compared, gb_per_s, in_words, ratio_of
from bench.store.bed import AT_ONCE, WRITERS, Bed
from bench.store.blocks import BATCH_BYTES, Slots
from bench.store.churn import churn
from bench.store.codec import codec
from bench.store.ground import Scale, drop_caches, note, scale_of, store_arguments, working_folder
from bench.store.kinds import Kind
from bench.store.opening import opening
from kvtier.store.durability import Durability

BUSY_BYTES = 64 * MIB
# The store in this process gives up the interpreter's lock for most blocks, and has it back 5 ms later.
BUSY_BYTES_INLINE = 2 * BATCH_BYTES

Case = Callable[[Bed, Kind, str], list[Row]]


def write_process(bed: Bed, kind: Kind, name: str) -> list[Row]:
    """Writes at level process, against one pwritev a batch."""
    return _writes(bed, kind, Durability.PROCESS, name, 0.8)


def write_commit(bed: Bed, kind: Kind, name: str) -> list[Row]:
    """Writes at level commit, against one pwritev and one fdatasync a batch."""
    return _writes(bed, kind, Durability.COMMIT, name, 0.55)


def _writes(bed: Bed, kind: Kind, level: Durability, name: str, minimum: float) -> list[Row]:
    durable = level is Durability.COMMIT
    bed.turn_over(kind, level)
    # Several threads put, as in the engine: while one batch is written, the next one's digests are computed.
    num_batches = bed.scale.batches
    writing = bed.writing(bed.open(kind, level), num_batches, at_once=WRITERS)
    sides = [writing, bed.writing_raw(num_batches, durable=durable)]
    if durable:
        sides[0] = bed.metered(sides[0])
    num_bytes = bed.scale.batches * BATCH_BYTES
    times = alternate(sides, bed.scale.rounds)
    label = "pwritev, fdatasync" if durable else "pwritev"
    rows = compared(name, times["kvtier"], (label, times["raw"]), num_bytes, minimum)
    if durable:
        num_put = num_bytes * (bed.scale.rounds + 1)
        rows.append(Row(f"{name}: bytes to the device / bytes put", bed.meter.written_bytes / num_put, ""))
    return rows


def hot_read(bed: Bed, kind: Kind, name: str) -> list[Row]:
    """Reads from the page cache, against copying as many blocks in memory."""
    bed.read_everything(kind)
    num_bytes = bed.scale.hot_bytes
    times = alternate([bed.reading(kind, num_bytes), bed.copying(num_bytes)], bed.scale.rounds)
    return compared(name, times["kvtier"], ("memcpy", times["raw"]), num_bytes, 0.6)


def cold_read(bed: Bed, kind: Kind, name: str) -> list[Row]:
    """Cold reads of prompts, against eight threads that read runs of blocks of the raw file with O_DIRECT."""
    num_bytes = bed.scale.cold_bytes
    alone, together = (bed.reading_cold(kind, num_bytes, num) for num in (1, AT_ONCE))
    alone = bed.metered(alone)
    sides = [alone, Side("together", together.prepare), bed.reading_direct(num_bytes)]
    times = alternate(sides, bed.scale.rounds)
    baseline = "O_DIRECT", times["raw"]
    return [
        *compared(f"{name}, 1 at once", times["kvtier"], baseline, num_bytes, 0.9),
        _from_device(bed, name, "bytes asked", num_bytes),
        *compared(f"{name}, {AT_ONCE} at once", times["together"], baseline, num_bytes, 0.9),
    ]


def cold_scattered_read(bed: Bed, kind: Kind, name: str) -> list[Row]:
    """Cold reads of unrelated blocks, which no prompt asks for: nothing is promised."""
    num_bytes = bed.scale.cold_bytes
    ours = bed.metered(bed.reading_cold(kind, num_bytes, is_scattered=True))
    times = alternate([ours, bed.reading_direct(num_bytes, is_scattered=True)], bed.scale.rounds)
    return [
        *compared(name, times["kvtier"], ("O_DIRECT", times["raw"]), num_bytes, None),
        _from_device(bed, name, "bytes asked", num_bytes),
    ]


def _from_device(bed: Bed, name: str, of_what: str, num_bytes: int) -> Row:
    """Bytes that the device read for *num_bytes*. Below 1 a read was not all cold; above 1 too much was read."""
    ratio = bed.meter.read_bytes / (num_bytes * (bed.scale.rounds + 1))
    return Row(f"{name}: bytes from the device / {of_what}", ratio, "")


def flushed_write(bed: Bed, kind: Kind, name: str) -> list[Row]:
    """Writes at level process after a sync, as at any pace that lets the kernel write: nothing is promised.

    All files are in memory and on the disk then, and each page that is written through a map costs a page fault.
    """
    bed.turn_over(kind)
    store = bed.open(kind)
    sides = [bed.writing(store, bed.scale.batches), bed.writing_raw(bed.scale.batches)]

    def flushed(side: Side) -> Side:
        def prepare() -> Work:
            os.sync()
            return side.prepare()

        return Side(side.name, prepare)

    times = alternate([flushed(side) for side in sides], bed.scale.rounds)
    return compared(name, times["kvtier"], ("pwritev", times["raw"]), bed.scale.batches * BATCH_BYTES, None)


def cold_write(bed: Bed, kind: Kind, name: str) -> list[Row]:
    """Writes at level process with no file in memory, as in a store larger than memory: nothing is promised."""
    num_batches = max(1, bed.scale.batches // 2)
    num_bytes = num_batches * BATCH_BYTES
    ours = bed.metered(bed.cold(lambda: bed.writing(bed.open(kind), num_batches).prepare()))
    raw = Side("raw", bed.cold(bed.writing_raw(num_batches).prepare).prepare)
    times = alternate([ours, raw], bed.scale.rounds)
    return [
        *compared(name, times["kvtier"], ("pwritev", times["raw"]), num_bytes, None),
        _from_device(bed, name, "bytes put", num_bytes),
    ]


def busy_write(bed: Bed, kind: Kind, name: str) -> list[Row]:
    """Writes beside a computing thread, with computing the digests and with ready ones."""
    bed.turn_over(kind)
    store, num_bytes = bed.open(kind), _busy_bytes(bed, kind)
    num_batches = num_bytes // BATCH_BYTES
    rows = _busy(bed, bed.writing(store, num_batches), kind, num_bytes, name)
    ready = bed.writing(store, num_batches, digests_ready=True)
    return rows + _busy(bed, ready, kind, num_bytes, f"{name}, digests ready")


def busy_hot_read(bed: Bed, kind: Kind, name: str) -> list[Row]:
    """Reads from the page cache beside a computing thread, one request at a time."""
    bed.read_everything(kind)
    num_bytes = _busy_bytes(bed, kind)
    return _busy(bed, bed.reading(kind, num_bytes), kind, num_bytes, name)


def busy_cold_read(bed: Bed, kind: Kind, name: str) -> list[Row]:
    """Cold reads beside a computing thread, one request at a time."""
    num_bytes = _busy_bytes(bed, kind)
    return _busy(bed, bed.reading_cold(kind, num_bytes), kind, num_bytes, name)


def _busy(bed: Bed, side: Side, kind: Kind | None, num_bytes: int, name: str) -> list[Row]:
    """Speed of *side* beside a thread that computes in Python, over its speed alone. Promised for a child only."""
    times = alternate([Side("quiet", side.prepare, side.after), bed.beside(side, "busy")], bed.scale.rounds)
    minimum = 0.5 if kind is Kind.CHILD else None
    return [
        Row(f"{name}: alone", gb_per_s(num_bytes, times["quiet"]), "GB/s"),
        Row(f"{name}: beside a computing thread", gb_per_s(num_bytes, times["busy"]), "GB/s"),
        at_least(f"{name}: beside it / alone", ratio_of(times["quiet"], times["busy"]), minimum),
    ]


def _busy_bytes(bed: Bed, kind: Kind) -> int:
    return min(BUSY_BYTES, bed.scale.hot_bytes) if kind is Kind.CHILD else BUSY_BYTES_INLINE


CASES: dict[str, Case] = {  # cases that need a full page cache come before those that empty it
    "write, level process": write_process,
    "write, level commit": write_commit,
    "flushed write": flushed_write,
    "hot read": hot_read,
    "busy write": busy_write,
    "busy hot read": busy_hot_read,
    "busy cold read": busy_cold_read,
    "cold read": cold_read,
    "cold scattered read": cold_scattered_read,
    "cold write": cold_write,
}


def by_block_size(folder: Path, kinds: list[Kind], scale: Scale, slots: Slots, choice: Choice) -> list[Row]:
    """Measure all cases for each block size."""
    rows: list[Row] = []
    for block_bytes in scale.block_sizes:
        size = in_words(block_bytes)
        chosen = [
            (f"{case}, {size}, {kind}", kind, work)
            for case, work in CASES.items()
            for kind in kinds
            if choice.has(f"{case}, {size}, {kind}")
        ]
        if not chosen:
            continue
        note(f"blocks of {size}: filling a store and a raw file")
        place = folder / "bed"
        place.mkdir()
        with closing(Bed(place, block_bytes, scale, slots)) as bed:
            for name, kind, work in chosen:
                note(name)
                bed.meter.reset()
                rows += work(bed, kind, name)
        shutil.rmtree(place)
    return rows


def main() -> None:
    """Measure opening, then the speed by block size, then overwriting and the codec."""
    parser = store_arguments((__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", default="inline,child", help="where the store is (inline,child)")
    options = parser.parse_args()
    scale, choice = scale_of(options), Choice(options.only)
    kinds = list(map(Kind, options.kinds.split(",")))
    note(f"kinds: {', '.join(kinds)}")
    gc.freeze()
    with working_folder(options.folder) as folder:
        note(f"cold reads: {drop_caches(folder, scale)}")
        slots = Slots(scale.source_bytes, max(scale.cold_bytes, scale.hot_bytes))
        rows: list[Row] = []
        if choice.has("open") or choice.has("prefix"):
            rows += opening(options.folder or folder, scale, slots, choice)
        rows += by_block_size(folder, kinds, scale, slots, choice)
        rows += churn(folder, scale, slots, choice)
        if choice.has("codec"):
            note("codec")
            rows += codec(scale.rounds)
    publish("store", choice.of(rows), options.json)


if __name__ == "__main__":
    main()
