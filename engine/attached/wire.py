"""What an engine and its sidecar say to each other at the sidecar's own endpoint.

Both sides send frames over one Unix socket: four bytes of length, then one of the messages below as MessagePack. The
engine says `Hello` first; the sidecar answers `Refused`, or `Welcome` with the descriptor of its segment. From then on
nothing waits for an answer: the engine asks, the sidecar answers when it can, and tells of every block that comes to
the tiers below or leaves them. A block's bytes never cross the socket. The connection is the session, and a sidecar
that was started anew is another connection.

What an engine leases ends when the engine closes its end of the connection, which it does only once nothing is copied
any more, or when the kernel does so as the engine's process ends. Every other process that copies for the engine, such
as a worker of tensor parallelism, says `Map` at a connection of its own, and keeps that open for as long as it maps the
segment. If a session ends in another way, because the engine does not read or is killed, the sidecar keeps what was
leased until all these connections are closed, or until the engine attaches again: see `Quarantine`.

Names are joined (32 bytes each), digests too (16), slots and places are little-endian int32, owners uint64.
"""

import secrets
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.store.record import DIGEST_BYTES
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.lower.name_set import NAME_BYTES
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.eviction import EvictionCause
from kvtier.tiers.naming.tier import Reason, Tier

VERSION = 3
LENGTH_BYTES = 4
ENGINE_BYTES = 16
MAX_FRAME_BYTES = 16 << 20  # a promotion of 100,000 blocks is three megabytes
MAX_BLOCKS = 1 << 17  # in one message
MAX_TRACED = 64  # requests that a message tells to be traced; an engine tells of half as many


class Malformed(ValueError):
    """A message that means nothing; the connection ends."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


class GroupShape(msgspec.Struct, frozen=True, array_like=True):
    """One attention group of an engine: tokens and bytes of its blocks, and whether it forgets (`AttentionGroup`)."""

    block_size: int
    forgets: bool
    block_bytes: int


class Start(msgspec.Struct, frozen=True, array_like=True):
    """The block at *place* continues *parent*, which is not the block before it; None: it is of use without one."""

    place: int
    parent: bytes | None


class Chain(msgspec.Struct, frozen=True, array_like=True):
    """Blocks *start* to before *end* of a message are one chain, tail first, that continues *parent*, if it is known:
    see `Row`."""

    start: int
    end: int
    parent: bytes | None


class Traced(msgspec.Struct, frozen=True, array_like=True):
    """The blocks at *places* of a message are those of a request that is traced: *traceparent* is its span, as W3C's
    header has it."""

    traceparent: str
    places: bytes


# What an engine says.


def new_engine() -> bytes:
    """Return a number that no other engine has."""
    return secrets.token_bytes(ENGINE_BYTES)


class Hello(_Message, frozen=True):
    """Who attaches. *namespace* (16 bytes) is everything beside the prompt that decides the bytes of a block.

    *engine* is the same each time this engine attaches, and its other processes give it with `Map`. An engine has one
    session: with its next `Hello` it says that nothing is copied any more of what it leased before.
    """

    version: int
    program: str  # such as "kvtier 0.1.0", for people
    model: str  # for people
    namespace: bytes
    groups: list[GroupShape]
    engine: bytes = msgspec.field(default_factory=new_engine)


class Map(_Message, frozen=True):
    """A process maps the segment to copy for *engine*. Answered as `Hello` is; then neither side says anything."""

    version: int
    program: str
    engine: bytes


class Fetch(_Message, frozen=True):
    """Lease these blocks in host memory, read from disk if need be; see `LowerTiers.fetch`. *number* is the engine's.

    The block at place i continues the block at i - 1, but for *starts*. *is_for_later*: see `fetch_later`.
    """

    number: int
    group: int
    names: bytes
    starts: list[Start]
    tenant: bytes
    is_for_later: bool


class Inquire(_Message, frozen=True):
    """Find out which of these blocks a remote tier has, a prefix's from the first on that the engine does not know to
    be below; see `LowerTiers.inquire`. Answered by `Inquired`. *number* is the engine's."""

    number: int
    group: int
    names: bytes


class Release(_Message, frozen=True):
    """End the leases on these places of a fetch, in this order, or do not wait for them any more."""

    number: int
    places: bytes


class TimeOut(_Message, frozen=True):
    """Give up the reads that the fetch waits for: they count as hanging, see `tiers.lower.Fetch.time_out`."""

    number: int


class Reserve(_Message, frozen=True):
    """Lease up to so many slots to copy blocks into."""

    group: int
    num_slots: int


class Publish(_Message, frozen=True):
    """The bytes in these reserved slots are complete, and the blocks can be found: see `LowerTiers.publish`.

    *traced* tells a sidecar that traces too whose blocks they are; an older one passes over it.
    """

    group: int
    slots: bytes
    names: bytes
    chains: list[Chain]
    digests: bytes
    owners: bytes
    traced: list[Traced] = []


class Abandon(_Message, frozen=True):
    """These reserved slots were not filled."""

    group: int
    slots: bytes


class Refresh(_Message, frozen=True):
    """These blocks were used just now; *were_read*: for each one byte, whether it came from disk, empty if none did."""

    group: int
    names: bytes
    were_read: bytes


class Forget(_Message, frozen=True):
    """The bytes of these blocks in host memory are not what their digests say."""

    group: int
    names: bytes


class Clear(_Message, frozen=True):
    """Forget every block of this namespace; answered by `Cleared`."""


class Ping(_Message, frozen=True):
    """Answered by `Pong`, at once."""


# What a sidecar says.


class Refused(_Message, frozen=True):
    """The engine cannot attach; *why* says what to do. The connection ends."""

    why: str


class Welcome(_Message, frozen=True):
    """The engine is attached. The descriptor of the segment, of *num_bytes*, comes with this frame.

    Slot s of a group with blocks of b bytes is bytes s * b to before (s + 1) * b of the segment. *boot* tells one
    process of a sidecar from another.
    """

    version: int
    program: str
    boot: bytes
    num_bytes: int


class InHost(_Message, frozen=True):
    """These blocks are in these host slots now."""

    group: int
    names: bytes
    slots: bytes


class LeftHost(_Message, frozen=True):
    """These blocks are not in host memory any more."""

    group: int
    names: bytes
    cause: EvictionCause = EvictionCause.ROOM


class OnDisk(_Message, frozen=True):
    """These blocks are on disk now."""

    group: int
    names: bytes


class LeftDisk(_Message, frozen=True):
    """These blocks are not on disk any more."""

    group: int
    names: bytes
    cause: EvictionCause = EvictionCause.ROOM


class Told(_Message, frozen=True):
    """The engine has been told of every block that was there before it attached."""


class Fetched(_Message, frozen=True):
    """Blocks of a fetch are leased now, in these slots, with their digests and tenants; or why they never come."""

    number: int
    places: bytes
    slots: bytes
    digests: bytes
    owners: bytes
    failures: list[tuple[int, Reason]]


class Inquired(_Message, frozen=True):
    """Of an inquiry, the blocks that a remote tier is believed to have, and nothing nearer; see `Presence`."""

    number: int
    names: bytes


class Reserved(_Message, frozen=True):
    """Of *num_asked* slots that were asked for these are leased."""

    group: int
    num_asked: int
    slots: bytes


class Cleared(_Message, frozen=True):
    """Every block of the namespace has been forgotten, and the engine has been told so before."""


class Pong(_Message, frozen=True):
    """The sidecar lives."""


class ReadState(msgspec.Struct, frozen=True, array_like=True):
    """How reads from one tier are: see `LowerTiers.read_speed` and `queued_read_bytes`."""

    bytes_per_s: float | None = None
    latency_s: float = 0.0
    queued_bytes: int = 0


class State(_Message, frozen=True):
    """How the tiers of this namespace are, see `LowerTiers`; sent when it changes, and about twice a second."""

    is_indexed: bool
    is_readable: bool
    is_making_room: bool
    reads: dict[Tier, ReadState]  # of tiers that are read from
    tiers: dict[Tier, TierStatistics]
    disk: DiskStatistics | None
    remote: RemoteStatistics | None
    host_tenants: list[tuple[bytes, int]]


FromEngine = (
    Hello | Map | Fetch | Inquire | Release | TimeOut | Reserve | Publish | Abandon | Refresh | Forget | Clear | Ping
)
FromSidecar = (
    Refused
    | Welcome
    | InHost
    | LeftHost
    | OnDisk
    | LeftDisk
    | Told
    | Fetched
    | Inquired
    | Reserved
    | Cleared
    | Pong
    | State
)

_encoder = msgspec.msgpack.Encoder()
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_from_sidecar = msgspec.msgpack.Decoder(FromSidecar)


def frame_of(message: FromEngine | FromSidecar) -> bytes:
    """The message as a frame."""
    buffer = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, buffer, LENGTH_BYTES)
    buffer[:LENGTH_BYTES] = (len(buffer) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return bytes(buffer)


def message_of_engine(payload: bytes | memoryview) -> FromEngine:
    """What an engine says in a frame's bytes without their length. `Malformed` if that is no message."""
    return _decoded(_from_engine, payload)  # type: ignore[no-any-return]  # of that decoder's type


def message_of_sidecar(payload: bytes | memoryview) -> FromSidecar:
    """The same for a sidecar."""
    return _decoded(_from_sidecar, payload)  # type: ignore[no-any-return]


class Frames:
    """Takes the bytes of a connection as they come, and gives the frames that are complete. Memory is bounded by one
    frame of *max_bytes* and a piece."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()

    @property
    def num_held_bytes(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._data)

    @property
    def has_more(self) -> bool:
        """Whether a frame is complete that `receive` has not given yet."""
        return self._end_of_frame(0) is not None

    def receive(self, data: bytes, limit: int = MAX_BLOCKS) -> list[bytes]:
        """The payloads of the next frames that are complete with *data*, at *limit* so many. `Malformed` for a frame
        that is too large."""
        self._data += data
        payloads, at = list[bytes](), 0
        while len(payloads) < limit and (end := self._end_of_frame(at)) is not None:
            payloads.append(bytes(memoryview(self._data)[at + LENGTH_BYTES : end]))
            at = end
        del self._data[:at]
        return payloads

    def _end_of_frame(self, at: int) -> int | None:
        """Where the frame ends that begins there; None if it is not complete."""
        if len(self._data) < at + LENGTH_BYTES:
            return None
        length = int.from_bytes(self._data[at : at + LENGTH_BYTES], "little")
        if length > self._max_bytes:
            raise Malformed(f"a frame of {length} bytes; at most {self._max_bytes} are taken")
        end = at + LENGTH_BYTES + length
        return end if end <= len(self._data) else None


def joined(names: Sequence[BlockName]) -> bytes:
    """The names as one row of bytes."""
    return b"".join(names)


def names_in(data: bytes) -> list[BlockName]:
    """The reverse of `joined`; `Malformed` if it is no row of names."""
    if len(data) % NAME_BYTES or len(data) > NAME_BYTES * MAX_BLOCKS:
        raise Malformed(f"{len(data)} bytes are no row of names")
    return cast(list[BlockName], np.frombuffer(data, f"V{NAME_BYTES}").tolist())


def digests_in(data: bytes, num_blocks: int) -> list[bytes]:
    """So many digests; `Malformed` if there are fewer or more."""
    if len(data) != DIGEST_BYTES * num_blocks:
        raise Malformed(f"{len(data)} bytes are no digests of {num_blocks} blocks")
    return cast(list[bytes], np.frombuffer(data, f"V{DIGEST_BYTES}").tolist())


def packed(numbers: Ids | npt.NDArray[Any] | Sequence[int]) -> bytes:
    """Slots or places as bytes."""
    return np.asarray(numbers, "<i4").tobytes()


def numbers_in(data: bytes, limit: int) -> Ids:
    """The reverse of `packed`; `Malformed` for a number below 0 or from *limit* on."""
    if len(data) % 4 or len(data) > 4 * MAX_BLOCKS:
        raise Malformed(f"{len(data)} bytes are no row of numbers")
    numbers = np.frombuffer(data, "<i4").astype(np.intp)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < limit:
        raise Malformed(f"a number below 0 or from {limit} on")
    return numbers


def owners_in(data: bytes, num_blocks: int) -> npt.NDArray[np.uint64]:
    """So many tenants as numbers; `Malformed` if there are fewer or more."""
    if len(data) != 8 * num_blocks:
        raise Malformed(f"{len(data)} bytes are no tenants of {num_blocks} blocks")
    return np.frombuffer(data, "<u8")


def starts_of(names: Sequence[BlockName], parents: Sequence[BlockName | None]) -> list[Start]:
    """Those of the blocks whose parent is not the block before."""
    return [
        Start(place, parent)
        for place, parent in enumerate(parents)
        if place == 0 or parent is None or parent != names[place - 1]
    ]


def parents_in(names: Sequence[BlockName], starts: Sequence[Start]) -> list[BlockName | None]:
    """The reverse of `starts_of`; `Malformed` for starts that are none."""
    parents: list[BlockName | None] = [None, *names[:-1]] if names else []
    for start in starts:
        if not 0 <= start.place < len(names) or (start.parent is not None and len(start.parent) != NAME_BYTES):
            raise Malformed("a start of a chain that is none")
        parents[start.place] = None if start.parent is None else BlockName(start.parent)
    return parents


def _decoded(decoder: msgspec.msgpack.Decoder[Any], payload: bytes | memoryview) -> Any:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"no message: {error}") from None
