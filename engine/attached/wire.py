"""kvtier's protocol between an engine and its sidecar.

Both sides send frames over one Unix socket. A frame is four bytes of length, then one of the messages below as
MessagePack. The engine sends `Hello` first. The sidecar answers with `Refused`, or with `Welcome` and the file
descriptor of its shared memory (the segment). After that, neither side waits for answers: the engine sends requests,
and the sidecar answers when it can. The sidecar also reports every block that is stored in or removed from its tiers. A
block's bytes never cross the socket. One connection is one session; a restarted sidecar needs a new connection.

The engine's leases end when the engine closes the connection. It does so only when no copy is in flight. If a copy
hangs, the connection stays open until the engine's process ends. Other processes may copy for the engine, for example
workers of tensor parallelism. Each of them sends `Map` on a connection of its own, and keeps this connection open as
long as it maps the segment.

A session may also end because the engine is killed or does not read. The sidecar then keeps the leases until
the connections of the engine and of these other processes are closed, or until the engine attaches again: see
`Quarantine`.

Sequences are packed into bytes: names (32 bytes each), digests (16 bytes each), slots and places (little-endian int32),
owners (the numbers of tenants, little-endian uint64). A place is the index of a block in a message or in a fetch.
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
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier

VERSION = 3
LENGTH_BYTES = 4
ENGINE_BYTES = 16
MAX_FRAME_BYTES = 16 << 20  # a `Fetch` of 100,000 blocks takes three megabytes
MAX_BLOCKS = 1 << 17  # in one message
MAX_TRACED = 64  # traced requests per message; an engine sends at most half as many


class Malformed(ValueError):
    """Raised for an invalid message. The receiver then ends the connection."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


class GroupShape(msgspec.Struct, frozen=True, array_like=True):
    """Shape of one attention group.

    *block_size* is in tokens. *forgets* says whether tokens read only recent blocks, as with a sliding window.
    *keeps_states* says whether the blocks are recurrent states.
    """

    block_size: int
    forgets: bool
    block_bytes: int
    keeps_states: bool = False


class Start(msgspec.Struct, frozen=True, array_like=True):
    """A block whose parent is not the block before it in the message.

    *place* is the index of the block in the message. *parent* is None if the block can be used without a parent.
    """

    place: int
    parent: bytes | None


class Chain(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks of a prompt in a message, in reverse order (the last block first); see `NamedSpan`.

    They are at the places *start* to *end* - 1 of the message. *parent* is the name of the block before them in the
    prompt, or None if it is not known.
    """

    start: int
    end: int
    parent: bytes | None


class Traced(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of a message that belong to a traced request.

    *places* has their indices in the message. *traceparent* is the W3C header of the request's span.
    """

    traceparent: str
    places: bytes


# Messages of an engine.


def new_engine() -> bytes:
    """Return a random engine id."""
    return secrets.token_bytes(ENGINE_BYTES)


class Hello(_Message, frozen=True):
    """An engine's request to attach to the sidecar.

    *namespace* (16 bytes) is a digest of everything besides the prompt that determines KV bytes. *engine* is an id that
    stays the same each time the engine attaches. The engine's other processes send this id with `Map`. An engine has
    one session at a time, and attaches again only when all copies of its previous session have ended.
    """

    version: int
    program: str  # such as "kvtier 0.1.0", for display
    model: str  # for display
    namespace: bytes
    groups: list[GroupShape]
    engine: bytes = msgspec.field(default_factory=new_engine)


class Map(_Message, frozen=True):
    """A request to map the sidecar's shared memory, from another process that copies blocks for *engine*.

    The sidecar answers with `Welcome` or `Refused`, and sends nothing else on this connection.
    """

    version: int
    program: str
    engine: bytes


class Fetch(_Message, frozen=True):
    """A request to lease blocks in host memory, reading them from colder tiers if necessary; see `LowerTiers.fetch`.

    The engine chooses *number*, which identifies the fetch. The parent of a block is the preceding block in *names*,
    unless *starts* has an entry for the block. *is_for_later* selects `ReadPriority.LATER`.
    """

    number: int
    group: int
    names: bytes
    starts: list[Start]
    tenant: bytes
    is_for_later: bool


class Inquire(_Message, frozen=True):
    """A request to look up blocks in the sidecar's remote tier, see `LowerHints.inquire`; answered by `Inquired`.

    *names* are consecutive blocks of a prompt. The first of them is the first block that the engine did not find in the
    sidecar's tiers. The engine chooses *number*, which identifies the lookup.
    """

    number: int
    group: int
    names: bytes


class Release(_Message, frozen=True):
    """The notice that the engine no longer needs the blocks at *places* of fetch *number*.

    Their leases end in the order of *places*. The engine no longer waits for those that have not arrived.
    """

    number: int
    places: bytes


class TimeOut(_Message, frozen=True):
    """The request to give up the reads for which a fetch waits, and to count them as hung.

    *number* identifies the fetch. See `lower_tiers.Fetch.time_out`.
    """

    number: int


class Reserve(_Message, frozen=True):
    """A request to lease up to *num_slots* slots, into which the engine will copy blocks."""

    group: int
    num_slots: int


class Publish(_Message, frozen=True):
    """The notice that blocks have been copied into reserved slots and can be used, see `LowerTiers.publish`.

    *traced* has the traced requests to which the blocks belong, for a sidecar that sends traces. An older sidecar
    ignores this field.
    """

    group: int
    slots: bytes
    names: bytes
    chains: list[Chain]
    digests: bytes
    owners: bytes
    traced: list[Traced] = []


class Abandon(_Message, frozen=True):
    """The return of reserved slots that the engine has not filled."""

    group: int
    slots: bytes


class Refresh(_Message, frozen=True):
    """The notice that these blocks were just used, so that they are evicted later.

    *were_read* has a byte for each block, 1 if the block was read from disk; it is empty if none was.
    """

    group: int
    names: bytes
    were_read: bytes


class Forget(_Message, frozen=True):
    """A request to drop blocks from host memory, because their bytes do not match their digests."""

    group: int
    names: bytes


class Clear(_Message, frozen=True):
    """The request to forget every block of this namespace; answered by `Cleared`."""


class Ping(_Message, frozen=True):
    """A request that is answered by `Pong` at once."""


# Messages of a sidecar.


class Refused(_Message, frozen=True):
    """The answer to an engine that cannot attach. *why* has the reason and what to do. The connection then ends."""

    why: str


class Welcome(_Message, frozen=True):
    """The answer to an engine that may attach. The file descriptor of the shared memory comes with this frame.

    The shared memory has *num_bytes* bytes. In a group with blocks of b bytes, slot s begins at byte s * b. *boot*
    identifies the sidecar's process.
    """

    version: int
    program: str
    boot: bytes
    num_bytes: int


class InHost(_Message, frozen=True):
    """The notice that these blocks are now in these host slots."""

    group: int
    names: bytes
    slots: bytes


class LeftHost(_Message, frozen=True):
    """The notice that these blocks have left host memory."""

    group: int
    names: bytes
    cause: EvictionCause = EvictionCause.ROOM


class OnDisk(_Message, frozen=True):
    """The notice that these blocks are now on disk."""

    group: int
    names: bytes


class LeftDisk(_Message, frozen=True):
    """The notice that these blocks have left the disk."""

    group: int
    names: bytes
    cause: EvictionCause = EvictionCause.ROOM


class Told(_Message, frozen=True):
    """The notice that the sidecar has reported every block that it had when the engine attached."""


class Fetched(_Message, frozen=True):
    """An answer to `Fetch`: blocks that are leased now, with their slots, digests and tenants (*owners*).

    *places* has the indices of the leased blocks in the fetch. *failures* has the indices of blocks that will never
    arrive, each with the reason.
    """

    number: int
    places: bytes
    slots: bytes
    digests: bytes
    owners: bytes
    failures: list[tuple[int, Reason]]


class Inquired(_Message, frozen=True):
    """The answer to `Inquire`: the blocks that are probably in the remote tier only; see `RemoteHints`."""

    number: int
    names: bytes


class Reserved(_Message, frozen=True):
    """The answer to `Reserve`: the leased slots, up to the *num_asked* slots that were requested."""

    group: int
    num_asked: int
    slots: bytes


class Cleared(_Message, frozen=True):
    """The notice that every block of the namespace has been forgotten. Earlier messages reported the removals."""


class Pong(_Message, frozen=True):
    """The answer to `Ping`."""


class ReadState(msgspec.Struct, frozen=True, array_like=True):
    """Speed and queue of reads from one tier, see `LowerStatus.read_speed` and `LowerStatus.queued_read_bytes`."""

    bytes_per_s: float | None = None
    latency_s: float = 0.0
    queued_bytes: int = 0


class TiersState(_Message, frozen=True):
    """State of the sidecar's tiers, see `LowerStatus`. Sent after each change, and about twice a second."""

    is_indexed: bool
    is_readable: bool
    is_making_room: bool
    reads: dict[Tier, ReadState]  # of the tiers that can be read from
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
    | TiersState
)

_encoder = msgspec.msgpack.Encoder()
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_from_sidecar = msgspec.msgpack.Decoder(FromSidecar)


def frame_of(message: FromEngine | FromSidecar) -> bytes:
    """Return the message as a frame."""
    buffer = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, buffer, LENGTH_BYTES)
    buffer[:LENGTH_BYTES] = (len(buffer) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return bytes(buffer)


def message_of_engine(payload: bytes | memoryview) -> FromEngine:
    """Decode an engine's message from the bytes after a frame's length. Raise `Malformed` if the message is invalid."""
    return _decoded(_from_engine, payload)  # type: ignore[no-any-return]  # `_decoded` returns Any


def message_of_sidecar(payload: bytes | memoryview) -> FromSidecar:
    """Decode a sidecar's message from the bytes after a frame's length. Raise `Malformed` if the message is invalid."""
    return _decoded(_from_sidecar, payload)  # type: ignore[no-any-return]


class Frames:
    """A buffer that splits the bytes of a connection into frames.

    It holds at most one incomplete frame of *max_bytes* and the bytes of one `receive` call.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()

    @property
    def num_held_bytes(self) -> int:
        """Number of received bytes that have not been returned yet."""
        return len(self._data)

    @property
    def has_more(self) -> bool:
        """True if a complete frame is available that `receive` has not returned yet."""
        return self._end_of_frame(0) is not None

    def receive(self, data: bytes, limit: int = MAX_BLOCKS) -> list[bytes]:
        """Add *data* and return the payloads of the next complete frames, at most *limit*.

        Raises:
            Malformed: If a frame is too large.
        """
        self._data += data
        payloads, at = list[bytes](), 0
        while len(payloads) < limit and (end := self._end_of_frame(at)) is not None:
            payloads.append(bytes(memoryview(self._data)[at + LENGTH_BYTES : end]))
            at = end
        del self._data[:at]
        return payloads

    def _end_of_frame(self, at: int) -> int | None:
        """Return the end of the frame that starts at *at*; None if the frame is incomplete."""
        if len(self._data) < at + LENGTH_BYTES:
            return None
        length = int.from_bytes(self._data[at : at + LENGTH_BYTES], "little")
        if length > self._max_bytes:
            raise Malformed(f"a frame has {length} bytes; send at most {self._max_bytes}")
        end = at + LENGTH_BYTES + length
        return end if end <= len(self._data) else None


def joined(names: Sequence[BlockName]) -> bytes:
    """Return the concatenated names."""
    return b"".join(names)


def names_in(data: bytes) -> list[BlockName]:
    """Split names concatenated by `joined`. Raises `Malformed` for a wrong length."""
    if len(data) % NAME_BYTES or len(data) > NAME_BYTES * MAX_BLOCKS:
        raise Malformed(f"wrong length of names: {len(data)} bytes, not {NAME_BYTES} for each of up to {MAX_BLOCKS}")
    return cast(list[BlockName], np.frombuffer(data, f"V{NAME_BYTES}").tolist())


def digests_in(data: bytes, num_blocks: int) -> list[bytes]:
    """Split *num_blocks* concatenated digests. Raises `Malformed` for a wrong length."""
    if len(data) != DIGEST_BYTES * num_blocks:
        raise Malformed(f"wrong length of digests: {len(data)} bytes, not {DIGEST_BYTES} for each of {num_blocks}")
    return cast(list[bytes], np.frombuffer(data, f"V{DIGEST_BYTES}").tolist())


def packed(numbers: Ids | npt.NDArray[Any] | Sequence[int]) -> bytes:
    """Return numbers, such as host slots or indices of blocks, as bytes."""
    return np.asarray(numbers, "<i4").tobytes()


def numbers_in(data: bytes, limit: int) -> Ids:
    """Unpack numbers packed by `packed`. Raises `Malformed` unless each number is from 0 to *limit* - 1."""
    if len(data) % 4 or len(data) > 4 * MAX_BLOCKS:
        raise Malformed(f"slots or indices have {len(data)} bytes; send 4 bytes for each of at most {MAX_BLOCKS}")
    numbers = np.frombuffer(data, "<i4").astype(np.intp)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < limit:
        raise Malformed(f"a number is out of range; it must be at least 0 and less than {limit}")
    return numbers


def owners_in(data: bytes, num_blocks: int) -> npt.NDArray[np.uint64]:
    """Unpack *num_blocks* tenant numbers. Raises `Malformed` for a wrong length."""
    if len(data) != 8 * num_blocks:
        raise Malformed(f"wrong length of tenants: {len(data)} bytes, not 8 for each of {num_blocks}")
    return np.frombuffer(data, "<u8")


def starts_of(names: Sequence[BlockName], parents: Sequence[BlockName | None]) -> list[Start]:
    """Return a `Start` for each block whose parent is not the block before it."""
    return [
        Start(place, parent)
        for place, parent in enumerate(parents)
        if place == 0 or parent is None or parent != names[place - 1]
    ]


def parents_in(names: Sequence[BlockName], starts: Sequence[Start]) -> list[BlockName | None]:
    """Return each block's parent: the block before it, unless *starts* has another.

    Raises `Malformed` if *starts* is invalid.
    """
    parents: list[BlockName | None] = [None, *names[:-1]] if names else []
    for start in starts:
        if not 0 <= start.place < len(names) or (start.parent is not None and len(start.parent) != NAME_BYTES):
            raise Malformed("in the field `starts`, an entry has an invalid block index or parent name")
        parents[start.place] = None if start.parent is None else BlockName(start.parent)
    return parents


def _decoded(decoder: msgspec.msgpack.Decoder[Any], payload: bytes | memoryview) -> Any:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not a valid message: {error}") from None
