"""LMCache's multiprocess protocol on the wire: the operations, their payloads, and answers to refused requests.

A request consists of the frames `uid, operation, payload…`. Its answer consists of `uid, operation, result`. Each frame
is one msgpack value. The protocol has no error answer, and a client that gets no answer waits until its timeout. So
every operation has a harmless result, which refused requests get.

Two forms of the protocol are served at the same time: that of lmcache 0.5.5 and 0.5.6, and that of 0.5.7. Clients do
not announce their version, but each message shows it: token ids are an array, or packed (`Key`), and two operations
have one more frame in 0.5.7. No state is kept per connection.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta, Raw, Struct, field

MAX_SALT_CHARACTERS = 128
FORBIDDEN_IN_SALTS = frozenset("@/\\\0")
MAX_RANGES = 4096
MAX_GROUPS = 64  # KV cache groups of an engine
NEGOTIATE = "negotiate_chunk_size"  # the first operation that vLLM's client of lmcache 0.5.7 sends
NEEDED_CLIENT = "lmcache>=0.5.5,<0.5.8"  # each release has changed the protocol

_Name = Annotated[str, Meta(max_length=4096)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Positive = Annotated[int, Meta(ge=1, lt=1 << 31)]

encode = msgspec.msgpack.Encoder().encode


class Refused(ValueError):
    """The error of a request that is invalid, or that this endpoint does not serve. Refusals are counted by *kind*."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RequestConfigs(Struct, frozen=True):
    """The settings of a request that the sidecar uses. A request may have other settings too."""

    skip_load: Any = field(default=None, name="lmcache.skip_load")
    num_computed: Any = field(default=None, name="lmcache.hint.engine_computed_tokens")


class Key(Struct, frozen=True):
    """The chunks that a request is about: those of a prompt's tokens from *start* to *end*.

    The ids of the tokens come in one of two fields. *token_ids* is a msgpack array as received, checked to be complete
    but not decoded (lmcache 0.5.5 and 0.5.6). *token_bytes* has big-endian 32-bit words (0.5.7).
    """

    model_name: _Name
    world_size: _Positive
    worker_id: _Count | None
    start: _Count
    end: _Count
    request_id: _Name
    token_ids: Raw = Raw()
    token_bytes: bytes | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARACTERS)] = ""
    num_kv_readers: _Count = 0  # 0: a client that does not know the field
    request_configs: RequestConfigs | None = None

    @property
    def wants_no_load(self) -> bool:
        """True if the user who sent the prompt has asked that no chunks be loaded for it."""
        return self.request_configs is not None and bool(self.request_configs.skip_load)

    @property
    def num_computed(self) -> int:
        """Number of tokens at the prompt's beginning that the engine has on its device.

        These are at least the tokens before *start* (a field of this key). lmcache 0.5.7 may report more.
        """
        told = None if self.request_configs is None else self.request_configs.num_computed
        return max(self.start, told) if type(told) is int else self.start

    def __post_init__(self) -> None:
        """Raise ValueError unless the key has either *token_ids* or *token_bytes*, the latter in whole 32-bit words."""
        if (self.token_bytes is None) == (not self.token_ids):
            raise ValueError("a key needs either token_ids or token_bytes, and not both")
        if self.token_bytes is not None and len(self.token_bytes) % 4:
            raise ValueError("the length of token_bytes is not a multiple of 4")


class GroupLayout(Struct, frozen=True):
    """A KV cache group of a worker's layout."""

    num_layers: _Positive
    hidden_dim_size: _Positive
    dtype_str: Annotated[str, Meta(max_length=64)]
    tokens_per_block: _Positive
    window_tokens: _Count = 0  # kept at the end of each chunk; 0: all
    kv_size: Annotated[int, Meta(ge=0, le=2)] = 0  # planes; 0: as the registration's `use_mla` says
    window_chunks: _Count = 0  # needed at the end of a hit; 0: the whole prefix
    recurrent: bool = False


class Registration(Struct, frozen=True):
    """A worker's description of its KV cache.

    *group_layouts* is empty if the worker has only one KV cache group. lmcache 0.5.5 and 0.5.6 never send it.
    """

    instance_id: int
    model_name: _Name
    world_size: _Positive
    block_size: _Positive
    num_layers: _Positive
    hidden_dim_size: _Positive
    dtype_str: Annotated[str, Meta(max_length=64)]
    use_mla: bool
    num_physical_slots: _Positive | None = None
    group_layouts: Annotated[tuple[GroupLayout, ...], Meta(max_length=MAX_GROUPS)] = ()


class Pool(Struct, frozen=True):
    """The answer to a registration: the shared memory that the worker has to map (the segment)."""

    shm_name: str
    pool_size: int


class Slot(Struct, frozen=True):
    """The place of a chunk in the shared memory that the worker has mapped (see `Pool`)."""

    offset: int
    length: int
    shape: list[int]
    dtype: str


class Room(Struct, frozen=True):
    """Slots in which a worker may store chunks.

    For each slot, *chunk_indices* has its chunk's place in the requested range, and *group_ids* its KV cache group.
    """

    slots: Sequence[Slot] = ()
    chunk_indices: Sequence[int] = ()
    group_ids: Sequence[int] = ()


class Stored(Struct, frozen=True):
    """The answer to `prepare_store`. Without slots the worker stores nothing."""

    context: Room = Room()


class NoEvents(Struct, frozen=True):
    """The answer to a subscription to KV events. The sidecar has none to send, so the client stops asking."""

    enabled: bool = False
    incarnation: int = 0
    next_cursor: int = 0
    lost: bool = False
    events: tuple[()] = ()


class NoModule(Struct, frozen=True):
    """The answer to `server_module_call`, which calls an optional module of LMCache's server. The sidecar has none."""

    success: bool = False
    payload: bytes = b""
    error: str = "the sidecar has no modules"


class Loaded(Struct, frozen=True):
    """The answer to `prepare_retrieve`. If *success*, *context* has a slot for each chunk that the worker needs."""

    success: bool = False
    data: bytes = b""
    context: dict[str, Sequence[Slot] | Sequence[int]] = {}


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of the protocol: its name, the decoders of its payload, and the answer to a refused request."""

    name: str
    payload: tuple[msgspec.msgpack.Decoder[Any] | None, ...] = ()  # None: any value
    harmless: object = None
    newer: msgspec.msgpack.Decoder[Any] | None = None  # for a last frame that older clients do not send

    def decode(self, frames: Sequence[bytes]) -> list[Any]:
        """Return the values in the payload frames. Raise `Refused` if their number or a value is invalid."""
        decoders = self.payload
        if self.newer is not None and len(frames) > len(decoders):
            decoders = (*decoders, self.newer)
        if len(frames) != len(decoders):
            raise Refused("payload", f"a {self.name} request has {len(frames)} payload frames, not {len(decoders)}")
        try:
            return [
                None if decoder is None else decoder.decode(frame)
                for decoder, frame in zip(decoders, frames, strict=True)
            ]
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Refused("payload", f"a {self.name} request is invalid: {_first_words(error)}") from None


def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


_KEY, _INT, _NAME = _decoder(Key), _decoder(int), _decoder(_Name)
_RANGES = _decoder(Annotated[list[tuple[_Count, _Count]], Meta(max_length=MAX_RANGES)])
_SKIPPED = _decoder(Annotated[list[list[_Count]], Meta(max_length=MAX_GROUPS)])
OPERATIONS: Mapping[int | str, Operation] = {
    8: Operation("lookup", (_KEY, _INT)),
    9: Operation("query_prefetch_status", (_NAME,), 0),
    10: Operation("wait_prefetch_status", (_NAME, _decoder(float)), 0),
    12: Operation("free_lookup_locks", (_KEY, _INT), newer=_RANGES),
    13: Operation("end_session", (_NAME,)),
    14: Operation("register_kv_cache_engine_driven_context", (_decoder(Registration),)),
    15: Operation("unregister_kv_cache_engine_driven_context", (_INT,)),
    16: Operation("prepare_store", (_KEY, _INT), Stored(), newer=_SKIPPED),
    17: Operation("commit_store", (_KEY, _INT, _decoder(bytes)), False),
    18: Operation("prepare_retrieve", (_KEY, _INT), Loaded()),
    19: Operation("commit_retrieve", (_KEY, _INT), True),
    20: Operation("clear", newer=_decoder(bool)),  # 0.5.5 sends no frame
    21: Operation("get_chunk_size"),
    22: Operation("ping", (_decoder(int | None),), True),
    23: Operation("report_block_allocation", (None, None, None)),
    24: Operation("noop", (), "OK"),
    32: Operation("get_experimental", (), ()),
    NEGOTIATE: Operation(NEGOTIATE, (_decoder(_Positive),)),
    "subscribe_kv_events": Operation("subscribe_kv_events", (None, None, None, None), NoEvents()),
    "server_module_call": Operation("server_module_call", (None, None), NoModule()),
    "server_module_affinity_call": Operation("server_module_affinity_call", (None, None), NoModule()),
}
# Operations of the mode in which the server copies from and to the device.
_OTHER_MODE: Mapping[int | str, str] = {1: "register_kv_cache", 6: "store", 7: "retrieve"}
# Old versions of lmcache, by the number that the operation `get_chunk_size` had in them.
_OLD_CHUNK_SIZE: Mapping[int | str, str] = {11: "0.4.5 or older", 18: "0.5.0 to 0.5.2"}

_decode_number = msgspec.msgpack.Decoder(int | str).decode


def decode_operation(frame: bytes, num_payload: int) -> int | str:
    """Return the operation's number or name. Raise `Refused` if the sidecar does not serve the operation."""
    try:
        number = cast("int | str", _decode_number(frame))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Refused("operation", "a request's operation is neither a number nor a name") from None
    version, other = _OLD_CHUNK_SIZE.get(number), _OTHER_MODE.get(number)
    if version is not None and not num_payload:
        raise Refused(
            "old_client",
            f"a client of lmcache {version} is not served; install {NEEDED_CLIENT} in the engine's environment",
        )
    if other is not None:
        raise Refused(
            "other_mode",
            f"{other}: the engine asks the sidecar to copy from the engine's device; start the engine with "
            'kv_connector_extra_config {"lmcache.mp.mp_transfer_mode": "engine_driven"}',
        )
    if number not in OPERATIONS:
        raise Refused(
            "operation", f"the operation {str(number)[:64]!r} is not known; clients must have {NEEDED_CLIENT}"
        )
    return number


def is_number(frame: bytes) -> bool:
    """Return whether the frame is an integer, as a request's `uid` must be so that an answer can repeat it."""
    try:
        return isinstance(_decode_number(frame), int)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def check_salt(salt: str) -> None:
    """Raise `Refused` for a salt that LMCache's own clients cannot send."""
    if FORBIDDEN_IN_SALTS & set(salt):
        raise Refused("salt", "a request's cache_salt has one of the forbidden characters @ / \\ NUL")


def _first_words(error: Exception) -> str:
    """Return a short description of *error* that quotes nothing from the client's message."""
    return str(error)[:200] if isinstance(error, msgspec.MsgspecError) else type(error).__name__
