"""`PrefixRequestRouter`: a request router for Ray Serve that uses the policy of `kvtier route`."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from weakref import ReferenceType, ref

from ray.serve.request_router import (
    LocalityMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from kvtier.engine.config import tree_from_dict
from kvtier.routing.config import IndexConfig, PolicyConfig
from kvtier.routing.event_feed import EventFeed
from kvtier.routing.kv_event import EventBatch, Publisher
from kvtier.routing.prefix_index import Matched
from kvtier.routing.ray_serve.received_request import Stage, Wanted, Way
from kvtier.routing.replica import Health, Replica, Work
from kvtier.routing.router import Routed, RoutedPrompt, Router

EVENTS, REPLAY = "kvtier_events", "kvtier_replay"  # keys of a replica's event endpoints in its routing stats
MAX_RANKED = 3  # replicas to try in the policy's order, before Ray chooses among the rest


class Feeds:
    """The tasks that receive KV events, one for each `Publisher` of a replica. Owned by the event loop."""

    def __init__(self) -> None:
        self._tasks: dict[Publisher, asyncio.Task[None]] = {}

    def listen(self, publisher: Publisher, take: Callable[[EventBatch], None], lose: Callable[[], None]) -> None:
        """Start to receive the events of *publisher*, unless a task does so already.

        *take* is called with each batch of events. *lose* is called when earlier batches have become
        unreliable, so that their blocks must be forgotten.
        """
        if publisher not in self._tasks:
            self._tasks[publisher] = asyncio.get_running_loop().create_task(EventFeed(publisher, take, lose).run())

    def end(self, name: str) -> None:
        """Stop receiving the events of the replica *name*."""
        for publisher in [each for each in self._tasks if each.name == name]:
            self._tasks.pop(publisher).cancel()


@dataclass(frozen=True, slots=True)
class _Sent:
    """A call that was sent to the replica *name*. Closing *end* removes the call from the replica's load."""

    prompt: RoutedPrompt
    ranks: Mapping[str, Routed]  # the replicas that the call could go to, best first
    name: str
    work: Work
    end: ExitStack


class PrefixRequestRouter(LocalityMixin, RequestRouter):
    """A Ray request router that prefers replicas which have much of the prompt cached and are not too busy.

    From the replicas' KV events, the router knows which blocks each replica has in device memory, in host memory and on
    disk. A call with neither a prompt nor a key for routing goes to the less busy of two random replicas.

    Ray creates one router in each process that calls the deployment. Owned by the event loop in which Ray routes.
    """

    def initialize_state(self, policy: Mapping[str, object], index: Mapping[str, object]) -> None:
        """Initialize the router without replicas. *policy* and *index* are tables of `kvtier route`'s configuration."""
        policy_config: PolicyConfig = tree_from_dict(PolicyConfig, policy, "policy")
        index_config: IndexConfig = tree_from_dict(IndexConfig, index, "index")
        self._router = Router(policy_config, index_config)
        self._feeds = Feeds()
        self._sent: dict[ReferenceType[Way], _Sent] = {}  # a call has ended if its way no longer exists

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Receive the events of new replicas, and forget replicas that are no longer among *replicas*."""
        super().update_replicas(list(replicas))
        there = {each.replica_id.unique_id: each for each in replicas}
        for name in self._router.replicas.keys() - there.keys():
            self._forget(name)
        for name, replica in there.items():
            if name not in self._router.replicas:
                self._router.add(Replica(name, health=Health.READY))
            if (events := replica.routing_stats.get(EVENTS)) is not None:
                publisher = Publisher(name, events, replica.routing_stats.get(REPLAY))
                self._feeds.listen(publisher, partial(self._router.learn, name), partial(self._router.forget, name))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that Ray has found dead."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas that a call may go to, as a list of ranks. Ray tries the first rank first."""
        way = None if pending_request is None else _way_of(pending_request)
        if pending_request is None or way is None or (way.wanted is None and way.key is None):
            return self._any(pending_request)
        pending_request.routing_context.should_backoff = True  # wait before the next attempt if all replicas are full
        there = {each.replica_id.unique_id: each for each in candidate_replicas}
        self._weigh()
        names = self._ranked(way) if way.wanted is not None else self._by_key(way.key or b"")
        ranks = [[there.pop(name)] for name in names if name in there]
        return [*ranks, list(there.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Record which replica has accepted a call. If the best replica was full, Ray has chosen another one."""
        way, name = _way_of(pending_request), replica_id.unique_id
        sent = None if way is None else self._sent.get(ref(way))
        if way is not None and sent is not None and sent.name != name and name in self._router.replicas:
            self._take_back(way)
            self._send(way, sent.prompt, sent.ranks, name)

    def matched(self, wanted: Wanted) -> Mapping[str, Matched]:
        """Return how many tokens of a prompt each replica has. Replicas that have none are left out."""
        return self._router.matched(self._prompt(wanted))

    def _prompt(self, wanted: Wanted) -> RoutedPrompt:
        return self._router.prompt(wanted.question, wanted.tokens, wanted.salt, wanted.who)

    def _any(self, pending_request: PendingRequest | None) -> list[list[RunningReplica]]:
        found = list(self.apply_locality_routing(pending_request))
        two = random.sample(found, min(2, len(found)))
        return [[self.curr_replicas[each] for each in two]]

    def _ranked(self, way: Way) -> Sequence[str]:
        """Return the names of the best replicas for the call's prompt, at most `MAX_RANKED`, best first."""
        wanted = way.wanted
        assert wanted is not None, "no prompt"
        self._take_back(way)  # all replicas were full at the previous attempt
        prompt = self._prompt(wanted)
        ranks: dict[str, Routed] = {}
        while len(ranks) < MAX_RANKED and (routed := self._router.choose(prompt, ranks)) is not None:
            ranks[routed.choice.name] = routed
        if ranks:
            # Record the choice before Ray has sent the call, or all calls until then would go to the same replica.
            self._send(way, prompt, ranks, next(iter(ranks)))
        return list(ranks)

    def _by_key(self, key: bytes) -> Sequence[str]:
        name = self._router.any_open(key)
        return [] if name is None else [name]

    def _send(self, way: Way, prompt: RoutedPrompt, ranks: Mapping[str, Routed], name: str) -> None:
        routed = ranks.get(name)
        num_computed = max(0, prompt.num_tokens - (0 if routed is None else routed.matched.total))
        end = ExitStack()
        work = end.enter_context(self._router.replicas[name].working(num_computed))
        self._router.sent(prompt, name)
        self._sent[ref(way)] = _Sent(prompt, ranks, name, work, end)

    def _take_back(self, way: Way) -> None:
        if (sent := self._sent.pop(ref(way), None)) is not None:
            sent.end.close()
            if sent.name in self._router.replicas:
                self._router.refused(sent.prompt, sent.name)

    def _weigh(self) -> None:
        """Update each replica's load: remove calls that have ended, and count the requests of other routers."""
        for reference, sent in list(self._sent.items()):
            if (way := reference()) is None or way.stage is Stage.ENDED:
                del self._sent[reference]
                sent.end.close()
            elif way.stage is Stage.ANSWERING:
                sent.work.begin()
        for replica_id in self.curr_replicas:
            if (replica := self._router.replicas.get(replica_id.unique_id)) is not None:
                num_there = self.replica_queue_len_cache.get(replica_id) or 0
                replica.num_elsewhere = max(0, num_there - replica.num_sent)

    def _forget(self, name: str) -> None:
        self._feeds.end(name)
        if name in self._router.replicas:
            self._router.remove(name)


def _way_of(pending_request: PendingRequest) -> Way | None:
    arguments = (*pending_request.args, *pending_request.kwargs.values())
    return next((each for each in arguments if isinstance(each, Way)), None)
