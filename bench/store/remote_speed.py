"""How fast do verified blocks come from a Redis server, next to raw GETs of the same bytes, and next to LMCache?

A server of this machine, over loopback: it and the client share the cores. Raw is the same client asked for the same
values, over the same connections, without opening them: no copy into the block's place, no digest. LMCache's adapter
`resp` is C++ with 8 connections; it verifies nothing. Its process and this one take turns at one server.
"""

import argparse
import gc
import os
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
from foreign.told_script import ToldScript
from redis import Redis
from redis_servers import SERVER, running_server

from bench.report import Row, arguments, publish
from bench.rounds import KIB, MIB, Side, Work, alternate, compared, gb_per_s, in_words, ready, seconds
from bench.store.ground import note
from kvtier.store.blob_store import Blob
from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import CODECS, NO_CODEC, Codec
from kvtier.store.record import Fault, digest
from kvtier.store.remote.redis_remote import RedisRemote
from kvtier.store.remote.redis_settings import RedisSettings
from kvtier.store.remote.sealed_remote import SealedRemote

BLOCK_SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
REQUEST_BYTES = 16 * MIB  # that one thread asks for in one call
AT_ONCE = (1, 4)  # threads that ask
ASKED_AT_ONCE = 32  # keys
MIN_OF_RAW = 0.7
MIN_OF_LMCACHE = 1.5
LMCACHE_KEYS = 32  # of 1 MiB, as tests/support/foreign/lmcache_l2_measure.py stores and loads them


@dataclass(frozen=True)
class Scale:
    """How much one measurement reads, and how often."""

    num_bytes: int = 128 * MIB
    rounds: int = 15


QUICK = Scale(32 * MIB, 3)


class Bed:
    """Blocks of one size in the server, and memory to read them into."""

    def __init__(self, remote: RedisRemote, block_bytes: int, noise: memoryview) -> None:
        raws = [noise[start : start + block_bytes] for start in range(0, len(noise), block_bytes)]
        self.remote = remote
        self.blobs = [Blob(_key(block_bytes, i), digest(raw), raw) for i, raw in enumerate(raws)]
        self.outs = [memoryview(bytearray(block_bytes)) for _ in raws]
        self.num_bytes = len(noise)
        self._a_request = max(1, REQUEST_BYTES // block_bytes)

    def reading(self, name: str, sealed: SealedRemote, threads: ThreadPoolExecutor) -> Side:
        """Reads and verifies all blocks."""

        def read(ids: slice) -> None:
            blobs = self.blobs[ids]
            found = sealed.read_many([blob.key for blob in blobs], self.outs[ids])
            assert found == [blob.digest for blob in blobs], f"not the blocks: {set(found)}"

        return Side(name, ready(self._in_requests(read, threads)))

    def getting(self, name: str, threads: ThreadPoolExecutor) -> Side:
        """Reads the values of all blocks."""

        def get(ids: slice) -> None:
            found = self.remote.get_many([blob.key for blob in self.blobs[ids]])
            assert not any(isinstance(value, Fault) for value in found), f"not the blocks: {found}"

        return Side(name, ready(self._in_requests(get, threads)))

    def getting_by_library(self, name: str, client: Redis, threads: ThreadPoolExecutor) -> Side:
        """Reads the values of all blocks as redis-py does by itself, a pipeline for each request."""

        def get(ids: slice) -> None:
            pipeline = client.pipeline(transaction=False)
            for blob in self.blobs[ids]:
                pipeline.get(b"kvtier:{%b}" % blob.key.hex().encode())
            assert None not in pipeline.execute(), "blocks are missing"

        return Side(name, ready(self._in_requests(get, threads)))

    def putting(self, name: str, sealed: SealedRemote, threads: ThreadPoolExecutor) -> Side:
        """Puts all blocks over what is there; their digests are known."""

        def put(ids: slice) -> None:
            assert all(sealed.put_many(self.blobs[ids])), "the server takes no more"

        return Side(name, ready(self._in_requests(put, threads)))

    def put(self, sealed: SealedRemote) -> None:
        """Put all blocks, which the server must have room for."""
        assert all(sealed.put_many(self.blobs)), "the server takes no more: raise its maxmemory"

    def forget(self) -> None:
        """Delete all blocks."""
        self.remote.forget(_namespace())

    def _in_requests(self, ask: Callable[[slice], None], threads: ThreadPoolExecutor) -> Work:
        starts = range(0, len(self.blobs), self._a_request)
        return lambda: list(threads.map(ask, [slice(start, start + self._a_request) for start in starts]))


def _namespace() -> bytes:
    return b"bench/%010d" % (os.getpid() % 10**10)


def _key(block_bytes: int, number: int) -> bytes:
    return _namespace() + sha256(b"%d %d" % (block_bytes, number)).digest()


def _bfloat16_noise(num_bytes: int) -> memoryview:
    """Of which the high bytes compress and the low ones do not, as of keys and values."""
    noise = np.random.default_rng(0).standard_normal(num_bytes // 2, dtype=np.float32)
    return memoryview((noise.view(np.uint32) >> 16).astype("<u2").tobytes())


def read_rows(remote: RedisRemote, client: Redis, scale: Scale) -> list[Row]:
    """Verified reads next to raw ones, by block size and number of threads; puts, and questions."""
    noise = _bfloat16_noise(scale.num_bytes)
    rows: list[Row] = []
    for block_bytes in BLOCK_SIZES:
        note(f"blocks of {in_words(block_bytes)}")
        bed = Bed(remote, block_bytes, noise)
        sealed = SealedRemote(remote)
        bed.put(sealed)
        for at_once in AT_ONCE:
            with ThreadPoolExecutor(at_once) as threads:
                sides = [
                    bed.reading("kvtier", sealed, threads),
                    bed.getting("raw GET", threads),
                    bed.getting_by_library("redis-py", client, threads),
                ]
                times = alternate(sides, scale.rounds)
                put = alternate([bed.putting("put", sealed, threads)], scale.rounds)["put"]
            size = f"{in_words(block_bytes)}, {at_once} thread{'s' * (at_once > 1)}"
            raw, minimum = ("raw GET", times["raw GET"]), MIN_OF_RAW if block_bytes == MIB else None
            rows += compared(f"read, {size}", times["kvtier"], raw, bed.num_bytes, minimum)
            rows.append(Row(f"read, {size}: redis-py by itself", gb_per_s(bed.num_bytes, times["redis-py"]), "GB/s"))
            rows.append(Row(f"put, {size}", gb_per_s(bed.num_bytes, put), "GB/s"))
        rows.append(_asking(bed, scale))
        bed.forget()
    return rows


def _asking(bed: Bed, scale: Scale) -> Row:
    keys = [blob.key for blob in bed.blobs[:ASKED_AT_ONCE]]
    took = [seconds(partial(bed.remote.exist_many, keys)) for _ in range(10 * scale.rounds)]
    return Row(f"ask, {in_words(len(bed.blobs[0].raw))}: {len(keys)} keys", 1e3 * statistics.median(took), "ms")


def form_rows(remote: RedisRemote, scale: Scale) -> list[Row]:
    """Blocks of 1 MiB, compressed and encrypted; GB/s are of the blocks, not of what goes over the wire."""
    noise = _bfloat16_noise(scale.num_bytes)
    forms: dict[str, tuple[Codec, Cipher | None]] = {
        "plain": (NO_CODEC, None),
        "zstd-plane-2": (CODECS["zstd-plane-2"], None),
        "encrypted": (NO_CODEC, Cipher(bytes(32))),
    }
    rows: list[Row] = []
    for form, (codec, cipher) in forms.items():
        note(form)
        bed, sealed = Bed(remote, MIB, noise), SealedRemote(remote, codec, cipher)
        bed.put(sealed)
        with ThreadPoolExecutor(max(AT_ONCE)) as threads:
            sides = [bed.reading("read", sealed, threads), bed.putting("put", sealed, threads)]
            times = alternate(sides, scale.rounds)
        name = f"{form}, 1 MiB, {max(AT_ONCE)} threads"
        rows += [Row(f"{name}: {what}", gb_per_s(bed.num_bytes, took), "GB/s") for what, took in times.items()]
        bed.forget()
    return rows


def lmcache_rows(python: str, settings: RedisSettings, remote: RedisRemote, scale: Scale) -> list[Row]:
    """Loads of 32 keys of 1 MiB, ours and LMCache's, round by round: the first one after a store, and the next."""
    ((host, port),) = settings.addresses
    spec = f'{{"type": "resp", "host": "{host}", "port": {port}}}'
    bed = Bed(remote, MIB, _bfloat16_noise(LMCACHE_KEYS * MIB))
    sealed = SealedRemote(remote)
    pairs: dict[str, list[tuple[float, float]]] = {"load": [], "load again": []}
    with ToldScript(python, "lmcache_l2_rounds.py", spec) as lmcache, ThreadPoolExecutor(max(AT_ONCE)) as threads:
        read = _in_shares(bed, sealed, max(AT_ONCE), threads)
        for number in range(scale.rounds + 1):
            seen = lmcache.round_of(number)
            bed.put(sealed)
            mine = {"load": seconds(read), "load again": seconds(read)}
            if number:  # the first one starts connections and threads
                for what, took in pairs.items():
                    took.append((mine[what], seen[what]))
    rows: list[Row] = []
    for what, took in pairs.items():
        ours, theirs = zip(*took, strict=True)
        name = f"{what}, {LMCACHE_KEYS} of 1 MiB"
        rows += compared(name, ours, ("LMCache resp", theirs), bed.num_bytes, MIN_OF_LMCACHE)
    return rows


def _in_shares(bed: Bed, sealed: SealedRemote, at_once: int, threads: ThreadPoolExecutor) -> Work:
    """Reads and verifies all blocks, each thread its share in one call."""

    def read(share: int) -> None:
        blobs = bed.blobs[share::at_once]
        found = sealed.read_many([blob.key for blob in blobs], bed.outs[share::at_once])
        assert found == [blob.digest for blob in blobs], f"not the blocks: {set(found)}"

    return lambda: list(threads.map(read, range(at_once)))


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "python -m bench.store.remote_speed --quick\n"
        "python -m bench.store.remote_speed --url redis://10.0.0.7:6379 --json\n"
        "python -m bench.store.remote_speed --python .venv/foreign/bin/python   LMCache beside it"
    )
    parser.add_argument(
        "--url", help="of a server that has room for half a GiB; one of its own otherwise, which it starts"
    )
    parser.add_argument("--python", help="of an environment with lmcache: make .venv/foreign/installed")
    parser.add_argument("--rounds", type=int, help=f"of each measurement ({Scale.rounds})")
    options = parser.parse_args()
    if options.url is None and SERVER is None:
        parser.error("needs redis-server: apt-get install redis-server, or name a server with --url")
    return options


def main() -> None:
    """Measure, and print."""
    options = parsed()
    scale: Scale = options.effort.of(Scale(), QUICK)
    scale = Scale(scale.num_bytes, options.rounds or scale.rounds)
    with ExitStack() as stack:
        url = options.url
        if url is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            server = stack.enter_context(running_server(Path(folder), "--maxmemory", "1gb"))
            url = f"redis://{server.address}"
        settings = RedisSettings.from_url(url)
        remote = stack.enter_context(RedisRemote(settings))
        client = stack.enter_context(Redis.from_url(url, protocol=2))
        gc.freeze()
        rows = read_rows(remote, client, scale) + form_rows(remote, scale)
        if options.python:
            note("LMCache")
            rows += lmcache_rows(options.python, settings, remote, scale)
    publish("remote_speed", rows, options.json)


if __name__ == "__main__":
    main()
