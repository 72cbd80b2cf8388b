"""EngineEndpoint: the endpoint for kvtier's own engines. Translates frames into calls of `Session`, and back."""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvtier.engine.attached import wire
from kvtier.engine.attached.wire import Frames, Malformed, frame_of
from kvtier.sidecar.endpoint import AttachedClient, ConnectorCounts
from kvtier.sidecar.layout import Layout, LayoutRefused
from kvtier.sidecar.layouts import Layouts
from kvtier.sidecar.own.block_layout import BlockLayout, BlockShape
from kvtier.sidecar.own.feed import Feed
from kvtier.sidecar.own.session import Session, SessionCounts
from kvtier.sidecar.port import Client, Port, peer
from kvtier.sidecar.quarantine import MAX_CLIENTS, Lifeline
from kvtier.sidecar.refusals import Refusals
from kvtier.tiers.lower.breaker import HUNG_S
from kvtier.tiers.naming.events import EventLog

log = logging.getLogger(__name__)

BOOT_BYTES = 16


class Mappers:
    """The processes of each engine that map the segment (host memory). Owned by the sidecar's thread.

    Each process has a connection of its own. A process may copy from or to the segment until it has closed its end of
    the connection, even if the sidecar has ended the connection earlier.
    """

    def __init__(self) -> None:
        self._engines: dict[Client[bytes], bytes] = {}  # by connection that the port still reads
        self._ended: list[tuple[bytes, str, Lifeline]] = []

    def __contains__(self, client: Client[bytes]) -> bool:
        return client in self._engines

    def add(self, client: Client[bytes], engine: bytes) -> None:
        """Record that a process maps the segment for *engine*."""
        self._engines[client] = engine

    def on_gone(self, client: Client[bytes]) -> None:
        """Record that the sidecar has ended this connection, which the process may still hold open."""
        ended = self._engines.pop(client), process_name(client), Lifeline.after_farewell(client.connection)
        self._ended.append(ended)
        self.poll()

    def names(self, engine: bytes) -> list[str]:
        """Return the names of the processes that map the segment for *engine*, for log lines."""
        self.poll()
        reading = [process_name(client) for client, its_engine in self._engines.items() if its_engine == engine]
        return reading + [name for its_engine, name, _ in self._ended if its_engine == engine]

    def poll(self) -> None:
        """Forget the connections that their processes have closed."""
        self._ended = [each for each in self._ended if not each[2].is_cut]

    def close(self) -> None:
        """Close the connections that are still open."""
        for _, _, lifeline in self._ended:
            lifeline.close()
        self._ended.clear()


def process_name(client: Client[bytes]) -> str:
    """Return a name with the id of the client's process. The id is 0 if the process is in another pid namespace."""
    return f"process {peer(client.connection).pid}"


class _Attached(NamedTuple):
    """An attached engine. *number* identifies the engine, see `engine` of `wire.Hello`."""

    session: Session
    feed: Feed
    number: bytes


class EngineEndpoint:
    """The endpoint for kvtier's own engines.

    An engine has one connection for its requests and leases (its `Session`), and one for each of its other processes
    that maps the sidecar's host memory. See `wire`.

    A request is answered at once, unless the answer has to wait for the disk, the remote tier, or the removal of all
    blocks (`wire.Clear`). An engine that sends an invalid message loses its connection at once. Its leases end when
    none of its processes can copy any more. Other engines are not affected.

    Owned by the sidecar's thread, whose loop polls the transfers and tiers, and then calls `tick` and `receive`.
    """

    def __init__(
        self, port: Port[bytes], layouts: Layouts, refusals: Refusals, clock: Callable[[], float], program: str
    ) -> None:
        """Start without engines. *program* is this program's name and version, which engines display."""
        self._port = port
        self._layouts = layouts
        self._refusals = refusals
        self._clock = clock
        self._program = program
        self._boot = secrets.token_bytes(BOOT_BYTES)
        self._feeds: dict[BlockLayout, Feed] = {}
        self._sessions: dict[Client[bytes], _Attached] = {}
        self._mappers = Mappers()
        self._ended: dict[bytes, list[Lifeline]] = {}  # by engine, for sessions in quarantine
        self._clearing: list[tuple[Client[bytes], Feed]] = []  # engines that wait for `Cleared`
        self._counts = SessionCounts()
        self._num_operations: Counter[str] = Counter()

    @property
    def file(self) -> int:
        """A file descriptor that is readable while there are frames to process."""
        return self._port.fileno()

    @property
    def is_waiting(self) -> bool:
        """True if an engine waits for blocks, or for the answer to `wire.Clear`."""
        return bool(self._clearing) or any(each.session.is_waiting for each in self._sessions.values())

    def receive(self) -> bool:
        """Process the frames that have arrived; return whether there is more to process or to send."""
        for message in self._port.receive():
            if message.client.is_open:
                self._serve(message.client, message.content)
        self._end_gone()
        self._tell_changes()
        return self._port.has_more or bool(self._clearing) or any(feed.has_more for feed in self._feeds.values())

    def tick(self) -> None:
        """Send engines the results of reads and the remote tier's answers. End hung fetches and connections."""
        self._port.tick()
        self._tell_changes()
        now = self._clock()
        for client, (session, _, _) in list(self._sessions.items()):
            for fetched in session.take_fetched():
                self._port.send(client, frame_of(fetched))
            for inquired in session.take_inquired():
                self._port.send(client, frame_of(inquired))
            if now - max(session.waits_since, self._counts.landed_at) > HUNG_S:
                session.time_out()
        for feed in self._feeds.values():
            feed.go_on()
            feed.tell_state(now)
        self._answer_cleared()
        self._end_gone()

    def close(self) -> None:
        """Stop receiving frames, and end every connection and lease.

        Engines may still be copying from or to the slots that they had leased. So after this call, no other block may
        be put into any slot.
        """
        self._port.close()
        for session, _, _ in self._sessions.values():
            session.end()
        self._sessions.clear()
        for client in self._port.take_disconnected():
            client.connection.close()
        self._mappers.close()

    def on_clear(self, layouts: Sequence[Layout]) -> None:
        """Ensure that no lookup ever finds the blocks that engines are writing to slots of these layouts now."""
        for session, feed, _ in self._sessions.values():
            if feed.tiers.layout in layouts:
                session.void()

    def clients(self) -> list[AttachedClient]:
        """Return a snapshot of the attached engines."""
        return [
            AttachedClient(_name(client), session.since, feed.tiers.layout, tuple(session.leases()))
            for client, (session, feed, _) in self._sessions.items()
        ]

    def counts(self) -> ConnectorCounts:
        """Return a snapshot of the counters that every kind of endpoint has."""
        counts = self._counts
        return ConnectorCounts(
            "engine",
            num_asked=counts.num_asked,
            num_promised=counts.num_leased,
            num_loaded=counts.num_loaded,
            num_stored=counts.num_stored,
            lost={
                "failed": counts.num_failed,
                "late": counts.num_late,
                "without_room": counts.num_without_room,
                "over_share": counts.num_over_share,
                "given_up": counts.num_given_up,
            },
            operations=dict(self._num_operations),
            refused=dict(self._refusals.counts),
        )

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        for session, _, _ in self._sessions.values():
            session.check()
        self._layouts.shares.check()
        assert set(self._sessions) <= set(self._port.clients), "a session has no connection"

    def _serve(self, client: Client[bytes], payload: bytes) -> None:
        try:
            message = wire.message_of_engine(payload)
            self._num_operations[type(message).__name__.lower()] += 1
            found = self._sessions.get(client)
            if isinstance(message, wire.Hello):
                if found is not None:
                    raise Malformed("a second Hello")
                self._attach(client, message)
            elif isinstance(message, wire.Map):
                if found is not None:
                    raise Malformed("a Map message on a connection that has sent Hello")
                self._map(client, message)
            elif found is None:
                raise Malformed("a message that may be sent only after Hello")
            else:
                self._do(client, found.session, found.feed, message)
        except Malformed as error:
            self._refusals.refused("malformed", f"an engine sent an invalid message: {error}; its connection is closed")
            self._port.end(client)

    def _attach(self, client: Client[bytes], hello: wire.Hello) -> None:
        if client in self._mappers:
            raise Malformed("a Hello message on a connection that has sent Map")
        if not self._may_come(client, hello):
            return
        shapes = tuple(
            BlockShape(group.block_size, group.forgets, group.block_bytes, group.keeps_states) for group in hello.groups
        )
        try:
            feed = self._feed(BlockLayout(hello.namespace, hello.model, shapes))
        except LayoutRefused as error:
            self._refuse(client, "layout", f"an engine of {hello.model[:64]!r} cannot be served: {error}")
            return
        self._end_earlier(hello.engine)
        self._welcome(client)
        session = Session(feed.tiers, self._counts, self._layouts.shares.of(client), self._clock)
        self._sessions[client] = _Attached(session, feed, hello.engine)
        feed.attach(client)
        log.info("engine: %.64r of process %d is attached", hello.program, peer(client.connection).pid)

    def _map(self, client: Client[bytes], message: wire.Map) -> None:
        if client in self._mappers:
            raise Malformed("a second Map message on one connection")
        if self._may_come(client, message):
            self._mappers.add(client, message.engine)
            self._welcome(client)

    def _may_come(self, client: Client[bytes], message: wire.Hello | wire.Map) -> bool:
        """Return whether the client may attach; if not, send it the reason."""
        if message.version != wire.VERSION:
            self._refuse(
                client,
                "version",
                f"the engine speaks version {message.version}, the sidecar version {wire.VERSION}; install the same "
                "kvtier in both environments",
            )
        elif len(message.engine) != wire.ENGINE_BYTES:
            raise Malformed(f"the engine's id has {len(message.engine)} bytes, but must have {wire.ENGINE_BYTES}")
        elif len(self._layouts.quarantine) >= MAX_CLIENTS:
            why = (
                f"slots of {MAX_CLIENTS} engines are in quarantine; "
                "end the processes that /v1/kvtier/leases names, then retry"
            )
            self._refuse(client, "quarantine", why)
        else:
            return True
        return False

    def _welcome(self, client: Client[bytes]) -> None:
        segment = self._layouts.segment
        welcome = wire.Welcome(wire.VERSION, self._program, self._boot, segment.num_bytes)
        self._port.send(client, frame_of(welcome), segment.file)

    def _feed(self, layout: BlockLayout) -> Feed:
        feed = self._feeds.get(layout)
        if feed is None:
            events = EventLog()
            tiers = self._layouts.open(layout, events)
            feed = self._feeds[layout] = Feed(tiers, events, self._port, self._layouts.segment.num_bytes)
        return feed

    def _refuse(self, client: Client[bytes], kind: str, why: str) -> None:
        self._refusals.refused(kind, why)
        self._port.send(client, frame_of(wire.Refused(why)))
        self._port.end(client)

    def _do(self, client: Client[bytes], session: Session, feed: Feed, message: wire.FromEngine) -> None:
        match message:
            case wire.Fetch():
                for fetched in session.fetch(message):
                    self._answer(client, feed, fetched)
            case wire.Inquire():
                session.inquire(message)
                for inquired in session.take_inquired():
                    self._answer(client, feed, inquired)
            case wire.Release():
                session.release(message)
            case wire.TimeOut():
                session.give_up(message)
            case wire.Reserve():
                self._answer(client, feed, session.reserve(message))
            case wire.Publish() | wire.Abandon() | wire.Refresh() | wire.Forget():
                session.take_in(message)
            case wire.Clear():
                self.on_clear([feed.tiers.layout])
                feed.tiers.clear()
                self._clearing.append((client, feed))
            case wire.Ping():
                self._port.send(client, frame_of(wire.Pong()))

    def _answer(self, client: Client[bytes], feed: Feed, answer: wire.FromSidecar) -> None:
        """Send the latest insertions and evictions, and then the answer, which depends on them.

        So before an engine is given a slot, it has been told which block was evicted from the slot.
        """
        feed.tell()
        self._port.send(client, frame_of(answer))

    def _tell_changes(self) -> None:
        for feed in self._feeds.values():
            feed.tell()

    def _answer_cleared(self) -> None:
        waiting, self._clearing = self._clearing, []
        for client, feed in waiting:
            if feed.tiers.tiers.is_forgetting:
                self._clearing.append((client, feed))
            else:
                self._answer(client, feed, wire.Cleared())

    def _end_gone(self) -> None:
        """End the sessions of the connections that have ended."""
        self._mappers.poll()
        for client in self._port.take_disconnected():
            self._clearing = [each for each in self._clearing if each[0] is not client]
            if client in self._sessions:
                self._end_session(client, self._sessions.pop(client))
            elif client in self._mappers:
                self._mappers.on_gone(client)
            else:
                client.connection.close()

    def _end_session(self, client: Client[bytes], attached: _Attached) -> None:
        """End the session. Its leases end as soon as no process of the engine can copy any more."""
        session, feed, number = attached
        feed.detach(client)
        session.stop_listening()
        name, process, lifeline = _name(client), process_name(client), Lifeline.after_farewell(client.connection)
        self._ended.setdefault(number, []).append(lifeline)

        def holders() -> list[str]:
            if lifeline not in self._ended.get(number, ()):  # the engine has attached again
                return []
            return ([] if lifeline.is_cut else [process]) + self._mappers.names(number)

        def let_go() -> None:
            ended = self._ended.get(number, [])
            if lifeline in ended:
                ended.remove(lifeline)
            if not ended:
                self._ended.pop(number, None)
            lifeline.close()
            session.end()

        client_then = AttachedClient(name, session.since, feed.tiers.layout, tuple(session.leases()))
        self._layouts.quarantine.hold("engine", client_then, holders, let_go)

    def _end_earlier(self, number: bytes) -> None:
        """End the earlier leases of an engine that attaches again. It no longer copies from or to their slots."""
        self._ended.pop(number, None)
        self._layouts.quarantine.poll()
        for client, attached in list(self._sessions.items()):
            if attached.number == number:
                del self._sessions[client]
                attached.feed.detach(client)
                attached.session.end()
                self._port.end(client)


def _name(client: Client[bytes]) -> str:
    return f"{process_name(client)}, connection {client.connection.fileno()}"


class EngineFrames(Frames):
    """The `Framing` of the connections of kvtier's own engines: each frame is one message."""

    def __init__(self) -> None:
        super().__init__()
        self.to_send = bytearray()  # always empty, because the framing itself sends nothing
