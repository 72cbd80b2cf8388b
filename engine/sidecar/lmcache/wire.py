"""LMCache's multiprocess protocol on the wire: the operations, what each carries, and what is answered when in doubt.

A request is the frames `uid, operation, payload…`, its answer `uid, operation, result`: each frame one msgpack value.
There is no answer that says "error": a client that gets none waits for its timeout. So every operation has a result
that does no harm, which any request gets that is refused. Of lmcache 0.5.5 and 0.5.6; 0.5.3 has the same numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta, Raw, Struct

MOST_SALT_CHARACTERS = 128
FORBIDDEN_IN_SALTS = frozenset("@/\\\0")
NEEDED_CLIENT = "lmcache >= 0.5.5"

_Name = Annotated[str, Meta(max_length=4096)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Positive = Annotated[int, Meta(ge=1, lt=1 << 31)]

encode = msgspec.msgpack.Encoder().encode


class Refused(ValueError):
    """A request that cannot be understood, or that asks for what this door does not do; *kind* is counted."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Key(Struct, frozen=True):
    """Which chunks of which tokens. *token_ids* is the array as it came, checked to be whole, not decoded."""

    model_name: _Name
    world_size: _Positive
    worker_id: _Count | None
    token_ids: Raw
    start: _Count
    end: _Count
    request_id: _Name
    cache_salt: Annotated[str, Meta(max_length=MOST_SALT_CHARACTERS)] = ""
    num_kv_readers: _Count = 0  # 0: a client that does not know the field


class Registration(Struct, frozen=True):
    """A worker's layout."""

    instance_id: int
    model_name: _Name
    world_size: _Positive
    block_size: _Positive
    num_layers: _Positive
    hidden_dim_size: _Positive
    dtype_str: Annotated[str, Meta(max_length=64)]
    use_mla: bool
    num_physical_slots: _Positive | None = None


class Pool(Struct, frozen=True):
    """Answers a registration: the segment that the worker maps. Empty: there is none."""

    shm_name: str = ""
    pool_size: int = 0


class Slot(Struct, frozen=True):
    """Where a chunk is in the segment."""

    offset: int
    length: int
    shape: list[int]
    dtype: str


class Room(Struct, frozen=True):
    """Slots to store into, and which chunks of the range each is for."""

    slots: Sequence[Slot] = ()
    chunk_indices: Sequence[int] = ()


class Stored(Struct, frozen=True):
    """Answers `prepare_store`. No slots: nothing is wanted."""

    context: Room = Room()


class Loaded(Struct, frozen=True):
    """Answers `prepare_retrieve`: a slot for every chunk of the range, or no success."""

    success: bool = False
    data: bytes = b""
    context: dict[str, Sequence[Slot]] = {}


@dataclass(frozen=True, slots=True)
class Operation:
    """What one operation is called, carries, and is answered when it is refused."""

    name: str
    payload: tuple[msgspec.msgpack.Decoder[Any] | None, ...] = ()  # None: whatever it is
    harmless: object = None

    def decode(self, frames: Sequence[bytes]) -> list[Any]:
        """The values of the payload; `Refused` unless they are what the operation carries."""
        if len(frames) != len(self.payload):
            raise Refused("payload", f"{self.name} has {len(frames)} payload frames, not {len(self.payload)}")
        try:
            return [
                None if decoder is None else decoder.decode(frame)
                for decoder, frame in zip(self.payload, frames, strict=True)
            ]
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Refused("payload", f"{self.name}: {_first_words(error)}") from None


def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


_KEY, _INT, _NAME = _decoder(Key), _decoder(int), _decoder(_Name)
OPERATIONS: Mapping[int | str, Operation] = {
    8: Operation("lookup", (_KEY, _INT)),
    9: Operation("query_prefetch_status", (_NAME,), 0),
    10: Operation("wait_prefetch_status", (_NAME, _decoder(float)), 0),
    12: Operation("free_lookup_locks", (_KEY, _INT)),
    13: Operation("end_session", (_NAME,)),
    14: Operation("register_kv_cache_engine_driven_context", (_decoder(Registration),), Pool()),
    15: Operation("unregister_kv_cache_engine_driven_context", (_INT,)),
    16: Operation("prepare_store", (_KEY, _INT), Stored()),
    17: Operation("commit_store", (_KEY, _INT, _decoder(bytes)), False),
    18: Operation("prepare_retrieve", (_KEY, _INT), Loaded()),
    19: Operation("commit_retrieve", (_KEY, _INT), True),
    20: Operation("clear", (_decoder(bool),)),
    21: Operation("get_chunk_size"),
    22: Operation("ping", (_decoder(int | None),), True),
    23: Operation("report_block_allocation", (None, None, None)),
    24: Operation("noop", (), "OK"),
    32: Operation("get_experimental", (), ()),
}
_OTHER_MODE: Mapping[int | str, str] = {
    1: "register_kv_cache",
    6: "store",
    7: "retrieve",
}  # the server copies from and to the device
_OLD_CHUNK_SIZE: Mapping[int | str, str] = {
    11: "0.4.5 or older",
    18: "0.5.0 to 0.5.2",
}  # the number of `get_chunk_size` then

_decode_number = msgspec.msgpack.Decoder(int | str).decode


def decode_operation(frame: bytes, num_payload: int) -> int | str:
    """The operation's number or name; `Refused` for what is neither, and for what only old clients send."""
    try:
        number = cast("int | str", _decode_number(frame))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Refused("operation", "an operation that is neither a number nor a name") from None
    version, other = _OLD_CHUNK_SIZE.get(number), _OTHER_MODE.get(number)
    if version is not None and not num_payload:
        raise Refused(
            "old_client", f"a client of lmcache {version} is not served; install {NEEDED_CLIENT} beside the engine"
        )
    if other is not None:
        raise Refused(
            "other_mode",
            f"{other}: the engine asks this process to copy from its device; start it with "
            'kv_connector_extra_config {"lmcache.mp.mp_transfer_mode": "engine_driven"}',
        )
    if number not in OPERATIONS:
        raise Refused("operation", f"the operation {str(number)[:64]!r} is not known")
    return number


def is_number(frame: bytes) -> bool:
    """Whether the frame is a request's number, to which an answer can be sent."""
    try:
        return isinstance(_decode_number(frame), int)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def check_salt(salt: str) -> None:
    """`Refused` for a salt that LMCache's own clients cannot send."""
    if FORBIDDEN_IN_SALTS & set(salt):
        raise Refused("salt", "a cache_salt with one of the characters @ / \\ NUL")


def _first_words(error: Exception) -> str:
    """What is wrong, without what a client may have put into it."""
    return str(error)[:200] if isinstance(error, msgspec.MsgspecError) else type(error).__name__
