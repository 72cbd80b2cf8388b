"""An endpoint of LMCache's protocol over real tiers and real shared memory, and clients of raw ZeroMQ frames."""

import mmap
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from chaos import FakeClock
from waiting import DEADLINE_S

from kvtier.sidecar.layouts import Layouts
from kvtier.sidecar.lmcache.endpoint import LmcacheEndpoint
from kvtier.sidecar.lmcache.zmtp import Zmtp
from kvtier.sidecar.port import Port, listen
from kvtier.sidecar.refusals import Refusals
from kvtier.store.memory_store import MemoryStore
from kvtier.transfer.lane import Finished, Transfer
from kvtier.transfer.segment import Segment
from kvtier.transfer.transfer_engine import Route, TransferEngine

CHUNK = 8  # tokens
EXTENT_BYTES = 1 << 16
CHUNK_BYTES = 4 * CHUNK * 16 * 2  # of `REGISTRATION`

REGISTRATION = {
    "instance_id": 1,
    "model_name": "m",
    "world_size": 1,
    "block_size": 4,
    "num_layers": 4,
    "hidden_dim_size": 16,
    "dtype_str": "bfloat16",
    "use_mla": True,
    "num_physical_slots": CHUNK,
}

OPS = {
    "lookup": 8,
    "status": 9,
    "wait_status": 10,
    "free": 12,
    "end_session": 13,
    "register": 14,
    "unregister": 15,
    "prepare_store": 16,
    "commit_store": 17,
    "prepare_retrieve": 18,
    "commit_retrieve": 19,
    "clear": 20,
    "get_chunk_size": 21,
    "ping": 22,
    "report": 23,
    "noop": 24,
    "get_experimental": 32,
}
FORMS = ["0.5.6", "0.5.7"]  # of the protocol, by the version of lmcache that came with each


def key(
    tokens: Sequence[int], request: str, start: int = 0, end: int | None = None, worker: int | None = 0, **more: Any
) -> dict[str, Any]:
    """Return a key as LMCache 0.5.6 has it; `RawClient` sends it in its own form."""
    return {
        "model_name": "m",
        "world_size": 1,
        "worker_id": worker,
        "token_ids": tokens,
        "start": start,
        "end": len(tokens) // CHUNK * CHUNK if end is None else end,
        "request_id": request,
        "cache_salt": "",
        "request_configs": None,
        "num_kv_readers": 1,
        **more,
    }


def packed(token_ids: Sequence[int]) -> bytes:
    """Return the ids as LMCache 0.5.7 has them in a key: big-endian words of 32 bits."""
    words = array("I", token_ids)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def in_form(form: str, op: str | int, payload: Sequence[Any]) -> list[Any]:
    """Return the payload of LMCache 0.5.6 in the given form of the protocol."""
    if form == "0.5.6":
        return list(payload)
    changed = [
        {**{name: part[name] for name in part if name != "token_ids"}, "token_bytes": packed(part["token_ids"])}
        if isinstance(part, dict) and "token_ids" in part
        else part
        for part in payload
    ]
    return [*changed, []] if op in ("free", "prepare_store") and len(payload) == 2 else changed


class Lane:
    """Works when it is told to: with everything else, unless it `is_stopped`."""

    def __init__(self, finished: Finished) -> None:
        self._finished = finished
        self.waiting: list[Transfer] = []
        self.is_stopped = False
        self.num_rests = 0  # times that it is told to work and does not

    @property
    def num_pending(self) -> int:
        return len(self.waiting)

    def submit(self, transfer: Transfer) -> bool:
        if len(self.waiting) >= 64:
            return False
        self.waiting.append(transfer)
        return True

    def work(self) -> None:
        if self.is_stopped or self.num_rests:
            self.num_rests = max(0, self.num_rests - 1)
            return
        waiting, self.waiting = self.waiting, []
        for transfer in waiting:
            transfer.run()
            self._finished.put(transfer)

    def close(self) -> bool:
        self.is_stopped, self.num_rests = False, 0
        self.work()
        return True


class RawClient:
    """A DEALER that says what it is told to, in one form of the protocol."""

    def __init__(self, bed: "Bed", form: str | None = None) -> None:
        """Connect. *form* is one of `FORMS`; the default is the bed's."""
        self._bed = bed
        self._form = form or bed.form
        self.socket = bed.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(bed.url)
        self._uid = 0

    def send(self, op: str | int, *payload: Any) -> int:
        """Ask; the number of the request."""
        self._uid += 1
        number = OPS.get(op, op) if isinstance(op, str) else op
        values = (self._uid, number, *in_form(self._form, op, payload))
        self.socket.send_multipart([msgspec.msgpack.encode(value) for value in values])
        return self._uid

    def receive(self) -> tuple[int, Any, Any]:
        """The next answer: number, operation, result."""
        frames = self._bed.until(lambda: self.socket.recv_multipart(zmq.NOBLOCK) if self.socket.poll(1) else None)
        uid, op, result = map(msgspec.msgpack.decode, frames)
        return uid, op, result

    def ask(self, op: str | int, *payload: Any) -> Any:
        """The answer to one request."""
        uid = self.send(op, *payload)
        while (answer := self.receive())[0] != uid:
            pass
        return answer[2]

    def close(self) -> None:
        """End the connection, as a process that is killed does."""
        before = self._bed.endpoint.statistics().num_clients
        self.socket.close(0)
        self._bed.until(lambda: self._bed.endpoint.statistics().num_clients < before or None)

    # Whole stories.

    def register(self, **changed: Any) -> Any:
        return self.ask("register", {**REGISTRATION, **changed})

    def lookup(self, tokens: Sequence[int], request: str, **more: Any) -> Any:
        self.ask("lookup", key(tokens, request, worker=None, **more), 1)
        while (found := self.ask("status", request)) is None:
            pass
        return found

    def store(self, tokens: Sequence[int], request: str, instance: int = 1, **more: Any) -> list[int]:
        """Store what is wanted of the tokens, each chunk with bytes made of its tokens; which chunks were wanted."""
        own = key(tokens, request, **more)
        context = self.ask("prepare_store", own, instance)["context"]
        self.write(context, own)
        if context["slots"]:
            assert self.ask("commit_store", own, instance, b"") is True
        return list(context["chunk_indices"])

    def write(self, context: Any, own: dict[str, Any]) -> None:
        """Write to the slots of an answer what the engine computes."""
        for slot, index in zip(context["slots"], context["chunk_indices"], strict=True):
            self._bed.bytes_of(slot)[:] = content(own["token_ids"], own["start"] // CHUNK + index, own["worker_id"])

    def prepare_retrieve(self, tokens: Sequence[int], request: str, instance: int = 1, **more: Any) -> Any:
        return self.ask("prepare_retrieve", key(tokens, request, **more), instance)

    def retrieve(self, tokens: Sequence[int], request: str, instance: int = 1, **more: Any) -> bool:
        """Load the chunks; whether they came. What comes is what was stored."""
        own = key(tokens, request, **more)
        answer = self.ask("prepare_retrieve", own, instance)
        slots = answer["context"]["slots"] if answer["success"] else []
        first = own["start"] // CHUNK
        good = [
            bytes(self._bed.bytes_of(slot)) == content(tokens, first + i, own["worker_id"])
            for i, slot in enumerate(slots)
        ]
        assert self.ask("commit_retrieve", own, instance) is True
        assert all(good), "a load gave wrong bytes"
        return len(good) == own["end"] // CHUNK - first


def content(tokens: Sequence[int], chunk: int, rank: int = 0, group: int = 0, num_bytes: int = CHUNK_BYTES) -> bytes:
    """The bytes that an engine computes for the chunk: they depend on all tokens up to its end."""
    seed = hash((tuple(tokens[: (chunk + 1) * CHUNK]), rank, group)) & 0xFFFFFFFF
    return np.random.default_rng(seed).bytes(num_bytes)


class Bed:
    """The sidecar's loop, turned by hand."""

    def __init__(
        self, folder: Path, stack: ExitStack, num_extents: int, store: MemoryStore | None, form: str, **settings: Any
    ) -> None:
        self.form = form  # of the protocol that clients speak
        self.clock = FakeClock()
        self.turn_s = 0.0  # that passes with each turn
        self.context = stack.enter_context(zmq.Context())
        self.url = f"ipc://{folder}/endpoint.sock"
        self.segment = stack.enter_context(Segment(num_extents * EXTENT_BYTES))
        assert self.segment.wait_backed(DEADLINE_S)
        finished = Finished()
        self.lanes = {route: Lane(finished) for route in Route}
        self.transfers = TransferEngine(self.lanes, finished)
        self.layouts = Layouts(
            self.segment, self.transfers, store, clock=self.clock, extent_bytes=EXTENT_BYTES, **settings
        )
        self.refusals = Refusals(self.clock)
        self.port = stack.enter_context(Port([listen(self.url)], self.clock, self.refusals.refused, Zmtp))
        self.endpoint = LmcacheEndpoint(self.port, self.layouts, self.transfers, CHUNK, self.refusals, self.clock)

    def turn(self) -> None:
        self.clock.now += self.turn_s
        self.endpoint.receive()
        for lane in self.lanes.values():
            lane.work()
        self.transfers.poll()
        self.layouts.poll()
        self.endpoint.tick()

    def until(self, happens: Callable[[], Any]) -> Any:
        """Turn the loop until that gives something. ZeroMQ's thread brings it, so real time passes."""
        give_up_at = time.monotonic() + DEADLINE_S
        while time.monotonic() < give_up_at:
            self.turn()
            if (found := happens()) is not None:
                return found
        raise AssertionError("nothing has come")

    def settle(self) -> None:
        for _ in range(60):
            self.turn()

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.settle()

    def bytes_of(self, slot: Any, num_bytes: int = CHUNK_BYTES) -> memoryview:
        """A chunk as a worker sees it, which has mapped the segment by its name."""
        assert slot["length"] == num_bytes
        with open(f"/dev/shm/{self.segment.name}", "r+b") as file:
            mapped = mmap.mmap(file.fileno(), self.segment.num_bytes)
        return memoryview(mapped)[slot["offset"] : slot["offset"] + slot["length"]]

    def num_leases(self) -> int:
        """Leases on slots that this segment really gives to its layouts: reserved, promised, being read."""
        return sum(tiers.num_leased for tiers in self.layouts)

    def check(self) -> None:
        self.endpoint.check()
        self.layouts.check()
        shares = self.layouts.shares
        assert self.num_leases() or not (shares.leased.num_bytes or shares.pending_bytes), "shares are left"


@contextmanager
def lmcache_bed(
    folder: Path,
    num_extents: int = 8,
    store: MemoryStore | None = None,
    form: str = "0.5.6",
    **settings: Any,
) -> Iterator[Bed]:
    """See `Bed`; *settings* are those of `Layouts`. Nothing is left in shared memory."""
    with ExitStack() as stack:
        bed = Bed(folder, stack, num_extents, store, form, **settings)
        yield bed
        bed.check()
