"""The commands `kvtier bench-remote` and `kvtier forget-remote`: measure a remote store, or delete blocks from it."""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from kvtier.cli.remote_arguments import remote_of
from kvtier.cli.user_input import confirm
from kvtier.engine.config import size_text
from kvtier.engine.stores.remote_store import remote_store
from kvtier.store.blob_store import Blob
from kvtier.store.record import NAMESPACE_BYTES, digest
from kvtier.store.remote.sealed_remote import SealedRemote
from kvtier.tiers.lower.name_set import block_key
from kvtier.tiers.lower.reads import BATCH_BLOCKS, BATCH_BYTES
from kvtier.tiers.naming.block_hash import BlockName

NUM_QUESTIONS = 64  # lookups to measure
ROUNDS = 3  # number of times that all blocks are read; the median time is used
# Bytes of keys and values per token, in bfloat16: 2 x layers x KV heads x head size x 2 bytes.
MODELS = {"1B, as Llama 3.2 1B": 32 << 10, "8B, as Llama 3.1 8B": 128 << 10, "70B, as Llama 3.1 70B": 320 << 10}


@dataclass(frozen=True, slots=True)
class Measured:
    """The speed of a remote store, measured from this machine. *where* is the store's address."""

    where: str
    block_bytes: int
    num_blocks: int
    ask_s: float  # median time of a lookup
    ask_p99_s: float  # longest time of the 64 lookups, which is about the 99th percentile
    put_bytes_per_s: float
    read_bytes_per_s: float
    num_wrong: int  # blocks that were not stored, or not read back with the same bytes


def bench_remote(options: argparse.Namespace) -> int:
    """Measure the store, print for which models its use pays off, and return the exit status."""
    with remote_store(remote_of(options, "bench-remote")) as store:
        namespace = os.urandom(NAMESPACE_BYTES)
        try:
            found = measure(SealedRemote(store), namespace, options.block, options.blocks, options.readers)
        finally:
            store.forget(namespace)
    models = MODELS if options.token_bytes is None else {"yours": options.token_bytes}
    if options.json:
        pays = {name: tokens_per_s(found, each) for name, each in models.items()}
        print(json.dumps({**asdict(found), "pays_below_tokens_per_s": pays}))
    else:
        _print(found, models, options.prefill)
    return 1 if found.num_wrong else 0


def measure(records: SealedRemote, namespace: bytes, block_bytes: int, num_blocks: int, num_readers: int) -> Measured:
    """Write random blocks, look them up and read them, as an engine does. Raise `RemoteUnavailable` if it fails."""
    blobs, parent = list[Blob](), b""
    for _ in range(num_blocks):
        raw = os.urandom(block_bytes)
        blobs.append(Blob(block_key(namespace, 0, BlockName(os.urandom(32))), digest(raw), memoryview(raw), parent))
        parent = blobs[-1].key
    limit = max(1, min(BATCH_BLOCKS, BATCH_BYTES // block_bytes))
    began_at = time.perf_counter()
    are_put = [is_put for part in _parts(blobs, BATCH_BLOCKS) for is_put in records.put_many(part)]
    put_s = time.perf_counter() - began_at
    ask_s = [_seconds(lambda: records.exist_many([blobs[0].key])) for _ in range(NUM_QUESTIONS)]
    rounds, num_wrong = [], are_put.count(False)
    with ThreadPoolExecutor(num_readers) as readers:
        for _ in range(ROUNDS):
            began_at = time.perf_counter()
            good = sum(readers.map(lambda part: _num_good(records, part, block_bytes), _parts(blobs, limit)))
            rounds.append(time.perf_counter() - began_at)
            num_wrong = max(num_wrong, num_blocks - good)
    num_bytes = block_bytes * num_blocks
    return Measured(
        records.where,
        block_bytes,
        num_blocks,
        statistics.median(ask_s),
        sorted(ask_s)[-1],
        num_bytes / put_s,
        num_bytes / statistics.median(rounds),
        num_wrong,
    )


def tokens_per_s(found: Measured, token_bytes: int) -> float:
    """Return the prefill speed, in tokens/s, above which loading a long prefix is slower than computing it."""
    return found.read_bytes_per_s / token_bytes


def min_tokens(found: Measured, token_bytes: int, prefill: int) -> float | None:
    """Return the length, in tokens, of the shortest prefix that loads faster than it is computed, or None.

    *prefill* is the prefill speed in tokens per second. Returns None if computing is faster at any length.
    """
    gained_s = 1 / prefill - token_bytes / found.read_bytes_per_s
    # A load costs two latencies more than its bytes: that of the lookup, and that of the first block.
    return found.ask_s * 2 / gained_s if gained_s > 0 else None


def _num_good(records: SealedRemote, blobs: Sequence[Blob], block_bytes: int) -> int:
    outs = [memoryview(bytearray(block_bytes)) for _ in blobs]
    found = records.read_many([blob.key for blob in blobs], outs)
    return sum(each == blob.digest for each, blob in zip(found, blobs, strict=True))


def _parts(blobs: Sequence[Blob], limit: int) -> Iterator[Sequence[Blob]]:
    for start in range(0, len(blobs), limit):
        yield blobs[start : start + limit]


def _seconds(work: Callable[[], object]) -> float:
    began_at = time.perf_counter()
    work()
    return time.perf_counter() - began_at


def _print(found: Measured, models: Mapping[str, int], prefill: int | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{found.where}: {found.num_blocks:,} blocks of {size_text(found.block_bytes)}, verified")
    console.print(f"lookup {1e3 * found.ask_s:.2f} ms (median), {1e3 * found.ask_p99_s:.2f} ms (max)")
    console.print(f"puts {found.put_bytes_per_s / 1e9:.2f} GB/s, reads {found.read_bytes_per_s / 1e9:.2f} GB/s")
    if found.num_wrong:
        console.print(f"{found.num_wrong:,} blocks were not stored, or were read back with other bytes")
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("model", "KV per token", "loading pays off below"):
        table.add_column(heading)
    for name, token_bytes in models.items():
        table.add_row(name, size_text(token_bytes), f"{tokens_per_s(found, token_bytes):,.0f} prefill tokens/s")
    console.print(table)
    if prefill is not None:
        for name, token_bytes in models.items():
            minimum = min_tokens(found, token_bytes, prefill)
            verdict = "never pays off" if minimum is None else f"pays off from {math.ceil(minimum):,} tokens of prefix"
            console.print(f"{name}, with a prefill of {prefill:,} tokens/s: loading {verdict}")


def forget_remote(options: argparse.Namespace) -> int:
    """Ask for confirmation, delete all blocks of the given namespaces, and return the exit status."""
    names: list[bytes] = options.namespace
    with remote_store(remote_of(options, "forget-remote")) as store:
        if not options.yes:
            confirm(f"delete all blocks of {', '.join(each.hex() for each in names)} from {store.where}?")
        for name in names:
            began_at = time.monotonic()
            print(f"{store.where}: deleting {name.hex()} …", file=sys.stderr, flush=True)
            store.forget(name)
            print(f"{store.where}: deleted {name.hex()} in {time.monotonic() - began_at:.1f} s")
    return 0
