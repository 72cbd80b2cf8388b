"""How many requests and bytes does a document cost in an object store, and how many as one object a block?

    python -m bench.store.object_requests            in a folder
    python -m bench.store.object_requests --url s3://bucket/bench --endpoint http://127.0.0.1:9000

Requests are those that the client counts. The baseline has an object for each block, whatever it is called: one PUT,
one HEAD to ask for it and one GET to read it. Dollars are by the list prices of S3 Standard in us-east-1 (a thousand
PUTs or LISTs $0.005, a thousand GETs or HEADs $0.0004); they promise nothing.
"""

import argparse
import hashlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.report import Row, arguments, publish
from bench.rounds import KIB, MIB, at_most, in_words
from kvtier.store.record import Fault, Record, digest
from kvtier.store.remote.object_remote import ObjectRemote
from kvtier.store.remote.object_settings import ObjectSettings
from kvtier.store.remote_store import RemoteRecord, RemoteUsage

BLOCK_TOKENS = 16
QUESTION_BLOCKS = 30  # a question and its answer
DOLLARS_A_WRITE = 0.005 / 1000
DOLLARS_A_READ = 0.0004 / 1000
FOLDER_TIMEOUT_S = 300.0  # half a GiB in one call to a busy disk takes long
SHARE = 0.05  # of the baseline's requests, for a document that was put at once


@dataclass(frozen=True)
class Document:
    """A document as a chain of blocks, put *call_blocks* at a time (0: all at once)."""

    num_tokens: int
    block_bytes: int
    call_blocks: int = 0

    @property
    def num_blocks(self) -> int:
        return self.num_tokens // BLOCK_TOKENS

    @property
    def name(self) -> str:
        put = f", {self.call_blocks} a call" if self.call_blocks else ""
        return f"{self.num_blocks} blocks of {in_words(self.block_bytes)}{put}"


PROMISED = Document(64_000, 128 * KIB)
DOCUMENTS = [
    Document(2_000, 128 * KIB),
    Document(16_000, 128 * KIB),
    PROMISED,
    Document(64_000, 128 * KIB, call_blocks=1024),
    Document(64_000, 128 * KIB, call_blocks=128),
    Document(16_000, MIB),
]
QUICK_PROMISED = Document(8_000, 128 * KIB)
QUICK_DOCUMENTS = [QUICK_PROMISED, Document(8_000, 128 * KIB, call_blocks=128), Document(800, MIB)]


@dataclass(frozen=True)
class Costs:
    """What one chain of a document took."""

    put: RemoteUsage
    asked: RemoteUsage
    read: RemoteUsage
    in_vain: RemoteUsage  # asked for a document that nobody has put
    shared: float  # of the document what is found with another question behind it, if it was put with a first one


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--url", help="an object store; else a folder that is deleted")
    parser.add_argument("--endpoint", default="", help="of a server that is not the cloud's own")
    parser.add_argument("--region", default="")
    parser.add_argument("--chains", type=int, help="of each document, for the medians (5)")
    options = parser.parse_args()
    with _place(options) as settings:
        num_chains = options.chains or options.effort.of(5, quick=1)
        documents = options.effort.of(DOCUMENTS, quick=QUICK_DOCUMENTS)
        rows = [row for document in documents for row in _rows(document, settings, num_chains)]
    publish("object_requests", rows, options.json)


@contextmanager
def _place(options: argparse.Namespace) -> Iterator[ObjectSettings]:
    if options.url:
        is_plain = options.endpoint.startswith("http:")
        yield ObjectSettings(options.url, options.endpoint, options.region, allow_http=is_plain, timeout_s=60)
        return
    # A call that is given up goes on writing, so none is: the folder could not be removed while it does.
    with tempfile.TemporaryDirectory() as folder:
        yield ObjectSettings(f"file://{folder}", timeout_s=FOLDER_TIMEOUT_S)


def _rows(document: Document, settings: ObjectSettings, num_chains: int) -> list[Row]:
    costs = [_costs(document, settings, seed) for seed in range(num_chains)]
    num_puts = statistics.median(cost.put.num_writes for cost in costs)
    num_asked = statistics.median(cost.asked.num_questions for cost in costs)
    num_read = statistics.median(cost.read.num_reads for cost in costs)
    dollars = 1000 * (num_puts * DOLLARS_A_WRITE + (num_asked + num_read) * DOLLARS_A_READ)
    alone = 1000 * document.num_blocks * (DOLLARS_A_WRITE + 2 * DOLLARS_A_READ)
    of_puts = num_puts / document.num_blocks
    of_gets = (num_asked + num_read) / document.num_blocks / 2
    name = document.name
    return [
        Row(f"{name}: PUTs", num_puts, ""),
        Row(f"{name}: GETs to ask", num_asked, ""),
        Row(f"{name}: GETs to read", num_read, ""),
        Row(f"{name}: GETs to ask in vain", _median(cost.in_vain.num_questions for cost in costs), ""),
        Row(f"{name}: found by another question", 100 * _median(cost.shared for cost in costs), "%"),
        Row(f"{name}: put", _median(cost.put.written_bytes for cost in costs) / MIB, "MiB"),
        Row(f"{name}: read", _median(cost.read.read_bytes for cost in costs) / MIB, "MiB"),
        Row(f"{name}: a segment", _median(c.put.written_bytes / c.put.num_writes for c in costs) / MIB, "MiB"),
        _share(f"{name}: PUTs / an object a block", of_puts, document),
        _share(f"{name}: GETs / an object a block", of_gets, document),
        Row(f"{name}: a thousand, each put and read once", dollars, "$"),
        Row(f"{name}: the same, an object a block", alone, "$"),
    ]


def _share(name: str, share: float, document: Document) -> Row:
    is_promised = document in (PROMISED, QUICK_PROMISED)
    return at_most(name, share, "", SHARE, varies=False) if is_promised else Row(name, share, "")


def _median(values: Iterator[float]) -> float:
    return statistics.median(values)


def _costs(document: Document, settings: ObjectSettings, seed: int) -> Costs:
    """Put, ask and read by clients that know nothing of each other, and verify that all came."""
    namespace = digest(f"bench {seed}".encode())
    keys = _chain(document.num_blocks, namespace, "put")
    with ObjectRemote(settings) as writer, ObjectRemote(settings) as reader, ObjectRemote(settings) as stranger:
        for start in range(0, len(keys), document.call_blocks or len(keys)):
            end = start + (document.call_blocks or len(keys))
            assert all(writer.put_many(_records(keys, start, end, document.block_bytes)))
        assert all(reader.exist_many(keys)), "not all that was put is found"
        asked = reader.usage()
        values = reader.get_many(keys)
        assert not any(isinstance(value, Fault) for value in values), "not all that was found is read"
        del values
        assert not any(stranger.exist_many(_chain(document.num_blocks, namespace, "never put")))
        costs = Costs(writer.usage(), asked, reader.usage(), stranger.usage(), _shared(document, settings, namespace))
        writer.forget(namespace)
    return costs


def _shared(document: Document, settings: ObjectSettings, namespace: bytes) -> float:
    """Put a document with a question, at once, and ask for it with another: the share of it that is found."""
    keys = _chain(document.num_blocks, namespace, "shared")
    first, second = ([*keys, *_chain(QUESTION_BLOCKS, namespace, seed)] for seed in ("one question", "another"))
    with ObjectRemote(settings) as writer, ObjectRemote(settings) as reader:
        assert all(writer.put_many(_records(first, 0, len(first), document.block_bytes)))
        found = [*reader.exist_many(second), False]
    return found.index(False) / document.num_blocks


def _chain(num_blocks: int, namespace: bytes, seed: str) -> list[bytes]:
    """Keys that commit to those before them, as names of blocks do."""
    names = [hashlib.sha256(seed.encode()).digest()]
    for _ in range(num_blocks):
        names.append(hashlib.sha256(names[-1]).digest())
    return [namespace + name + bytes(4) for name in names[1:]]


def _records(keys: Sequence[bytes], start: int, end: int, block_bytes: int) -> list[RemoteRecord]:
    """Records of equal payloads: requests do not depend on what is in them."""
    payload = memoryview(bytes(block_bytes))
    known = digest(payload)
    return [
        RemoteRecord(
            key,
            Record(key[:16], 0, block_bytes, block_bytes, known).pack(key),
            payload,
            keys[number - 1] if number else b"",
        )
        for number, key in enumerate(keys[start:end], start)
    ]


if __name__ == "__main__":
    main()
