"""`RedisCluster`: commands to the nodes of a cluster, in parallel."""

import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, InvalidResponse, MovedError
from redis.exceptions import TimeoutError as NoAnswer

from kvtier.store.remote.redis.cluster_member import ClusterMember, is_no_reply
from kvtier.store.remote.redis.command import Command, Reply
from kvtier.store.remote.redis.node import RedisNode
from kvtier.store.remote.redis_settings import Address, RedisSettings

_ASKING = Command(b"ASKING")
_SLOTS = Command(b"CLUSTER", (b"SLOTS",))
_MAX_REDIRECTIONS = 3  # of one key in one call; each costs a round trip
_PAUSE_S = 0.1  # between two requests for the slot map

Owners = list[Address | None]  # the slot map: which node has each of the cluster's hash slots


@dataclass(frozen=True)
class _Way:
    """The node that a command is sent to, and whether ASKING is sent before the command.

    A node requires ASKING while it is importing the command's hash slot.
    """

    address: Address
    is_asking: bool = False


class RedisCluster:
    """A client of the primary nodes of a cluster. All methods are thread-safe.

    A node that is down or silent makes only the commands for its own keys fail. The first calls to a silent node wait
    for one timeout. Later calls skip the node (see `ClusterMember`), and the slot map is requested again in the
    background.

    redis-py's own `RedisCluster` asks one node after the other and retries failed commands key by key. With it, a
    silent node would delay a batch by many times its timeout.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()  # guards all below
        self._members: dict[Address, ClusterMember] = {}
        self._owners: Owners | None = None
        self._trouble: Exception = NoAnswer("no node answers")  # why the slot map is not known
        self._looking: Future[None] = Future()
        self._looking.set_result(None)
        self._look_after = 0.0
        self._is_closed = False
        self._looker = ThreadPoolExecutor(1, "redis cluster")

    def ask(self, commands: Sequence[Command], until: float) -> list[Reply]:
        """Send *commands* and return the reply to each, or the error that says why there is none.

        Does not wait beyond *until*, a time of `time.monotonic`.
        """
        slots = [key_slot(command.key) for command in commands]
        owners = self._known_owners(until)
        if owners is None:
            return [self._trouble] * len(commands)
        replies: list[Reply] = [ClusterDownError("no node owns its slot")] * len(commands)
        ways = {i: _Way(owner) for i, slot in enumerate(slots) if (owner := owners[slot]) is not None}
        is_outdated = len(ways) < len(commands)
        for _ in range(1 + _MAX_REDIRECTIONS):
            for i, came in self._ask_nodes(commands, ways, until):
                replies[i] = came
            is_outdated |= any(_is_of_an_old_map(replies[i]) for i in ways)
            redirections = {i: reply for i in ways if isinstance(reply := replies[i], AskError)}
            ways = {i: self._redirected(slots[i], ways[i], reply) for i, reply in redirections.items()}
            if not ways or time.monotonic() >= until:
                break
        if is_outdated:
            self._look()
        return replies

    def primaries(self) -> list[RedisNode]:
        """Return the nodes that own hash slots, by the latest slot map. Raises an error if no slot map is known."""
        owners = self._known_owners(time.monotonic() + self._settings.timeout_s)
        if owners is None:
            raise self._trouble
        return [self._member(address).node for address in set(owners) if address is not None]

    def close(self) -> None:
        """Close all connections. Does not wait for the threads, which end soon after."""
        with self._lock:
            self._is_closed = True
            members = list(self._members.values())
        self._looker.shutdown(wait=False)
        for member in members:
            member.close()

    def _ask_nodes(
        self, commands: Sequence[Command], ways: Mapping[int, _Way], until: float
    ) -> Iterator[tuple[int, Reply]]:
        together: dict[_Way, list[int]] = {}
        for i, way in ways.items():
            together.setdefault(way, []).append(i)
        asked = {way: self._member(way.address) for way in together}
        futures = {way: member.ask(_told(way, commands, together[way]), until) for way, member in asked.items()}
        wait(futures.values(), max(0.0, until - time.monotonic()))
        for way, ids in together.items():
            if _has_come(futures[way]):
                replies = futures[way].result()
                yield from zip(ids, replies[1::2] if way.is_asking else replies, strict=True)
            else:
                asked[way].rests = True
                yield from ((i, NoAnswer(f"{way.address} did not answer in time")) for i in ids)

    def _redirected(self, slot: int, way: _Way, reply: AskError) -> _Way:
        """Return where to send a redirected command for *slot*. A permanent redirection also updates the slot map."""
        address = Address(reply.host or way.address.host, int(reply.port))
        if not isinstance(reply, MovedError):
            return _Way(address, is_asking=True)
        with self._lock:
            if self._owners is not None:
                self._owners[slot] = address
        return _Way(address)

    def _member(self, address: Address) -> ClusterMember:
        with self._lock:
            member = self._members.get(address)
            if member is None:
                member = self._members[address] = ClusterMember(address, self._settings)
                if self._is_closed:  # closed just now, without this member
                    member.close()
            return member

    def _known_owners(self, until: float) -> Owners | None:
        """Return the owner of each slot, or None if no node provides the slot map in time."""
        if self._owners is None:
            wait([self._look()], max(0.0, until - time.monotonic()))
        return self._owners

    def _look(self) -> "Future[None]":
        """Request the slot map in a background thread, and return a future that is done when the request has ended.

        Sends no second request while one is in progress or shortly after one.
        """
        with self._lock:
            is_time = self._looking.done() and time.monotonic() >= self._look_after
            if is_time and not self._is_closed:
                self._looking = self._looker.submit(self._look_around)
            return self._looking

    def _look_around(self) -> None:
        trouble: Reply = None
        for address in self._guides():
            if self._is_closed:
                return
            with closing(RedisNode(address, self._settings)) as node:
                (trouble,) = node.ask([_SLOTS], time.monotonic() + self._settings.timeout_s)
            owners = _owners_of(trouble, address)
            if owners is not None:
                self._learn(owners)
                break
        else:
            self._trouble = trouble if isinstance(trouble, Exception) else InvalidResponse("the reply is no slot map")
        self._look_after = time.monotonic() + _PAUSE_S

    def _guides(self) -> list[Address]:
        """Return the nodes to ask for the slot map: healthy ones in random order, configured ones, then silent ones."""
        with self._lock:
            members = list(self._members.items())
        random.shuffle(members)
        lively = [address for address, member in members if not member.rests]
        return list(dict.fromkeys([*lively, *self._settings.addresses, *(address for address, _ in members)]))

    def _learn(self, owners: Owners) -> None:
        """Use the slot map *owners* from now on, and close the members that own no slot."""
        with self._lock:
            self._owners = owners
            gone = [self._members.pop(address) for address in set(self._members).difference(owners)]
        for member in gone:
            member.close()


def _told(way: _Way, commands: Sequence[Command], ids: Sequence[int]) -> list[Command]:
    chosen = [commands[i] for i in ids]
    return [told for command in chosen for told in (_ASKING, command)] if way.is_asking else chosen


def _has_come(future: "Future[list[Reply]]") -> bool:
    return not future.cancel() and future.done() and not future.cancelled()


def _is_of_an_old_map(reply: Reply) -> bool:
    """Return whether *reply* suggests that the slot map is outdated."""
    return is_no_reply(reply) or isinstance(reply, MovedError | ClusterDownError)


def _owners_of(reply: Reply, told_by: Address) -> Owners | None:
    """Return the slot map in *reply*, a reply to CLUSTER SLOTS, or None if it has another form.

    *told_by* is the node that replied. If the reply contains an entry without a host, the host of *told_by* is used.
    """
    if not isinstance(reply, list):
        return None
    owners: Owners = [None] * REDIS_CLUSTER_HASH_SLOTS
    for slots in reply:
        match slots:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < len(owners):
                name = bytes(host).decode(errors="replace") if isinstance(host, memoryview) else ""
                address = Address(told_by.host if name in ("", "?") else name, port)
                owners[first : last + 1] = [address] * (last + 1 - first)
            case _:
                return None
    return owners
