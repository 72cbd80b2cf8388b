"""`Router`: the known state of all replicas, and the choice of a replica for a request."""

from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from kvtier.routing.config import IndexConfig, PolicyConfig
from kvtier.routing.fingerprints import Fingerprints, Prefixes
from kvtier.routing.kv_event import EventBatch
from kvtier.routing.policy import Candidate, Choice, RoutingPolicy
from kvtier.routing.prefix_index import NOTHING, Matched, PrefixIndex
from kvtier.routing.question import Question
from kvtier.routing.replica import Health, Replica
from kvtier.routing.token_cache import TokenArray

_POINTS = 64  # points on the ring per replica; the replicas' shares of the ring then differ by about an eighth
TEXT_STEP = 512  # bytes of a text between two prefixes that are compared
MAX_TEXT = 256 * TEXT_STEP  # bytes that are compared; texts that differ only after them count as equal
MAX_TOKENS = 1 << 17  # tokens that are compared; prompts that differ only after them count as equal
BYTES_PER_TOKEN = 4.0  # rough estimate for a text whose tokens are not known


class Sessions:
    """A table of the *limit* most recent conversations, each with the replica that served it last."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._replicas: OrderedDict[Hashable, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def replica_of(self, session: Hashable) -> str | None:
        """Return the replica that served the conversation last, or None if it is unknown."""
        return self._replicas.get(session)

    def keep(self, session: Hashable, replica: str) -> None:
        """Record that *replica* now serves the conversation."""
        self._replicas[session] = replica
        self._replicas.move_to_end(session)
        if len(self._replicas) > self._limit:
            self._replicas.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Forget all conversations of the replica."""
        self._replicas = OrderedDict((key, name) for key, name in self._replicas.items() if name != replica)


class HashRing:
    """A ring for consistent hashing.

    Each replica has many points on the ring. A key belongs to the replica whose point is the next one after the key.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._points = sorted((_place(f"{name} {i}".encode()), name) for name in names for i in range(_POINTS))
        self._num_names = len(names)

    def order(self, key: bytes) -> list[str]:
        """Return all replicas in the order in which they follow *key* on the ring.

        The order of the other replicas stays the same if a replica is removed.
        """
        start = bisect(self._points, (_place(key), ""))
        found: dict[str, None] = {}
        for i in range(len(self._points)):
            found[self._points[(start + i) % len(self._points)][1]] = None
            if len(found) == self._num_names:
                break
        return list(found)


def _place(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A prompt in the form in which the prefix index looks it up.

    *views* has the fingerprints of the prompt's prefixes, once for each block size that replicas use. If the prompt is
    looked up as text, there is only one view. *ring_key* is computed from the beginning of the prompt and is its key on
    the `HashRing`.
    """

    num_tokens: int
    views: Sequence[Prefixes]
    ring_key: bytes
    session: bytes | None


@dataclass(frozen=True, slots=True)
class Routed:
    """The choice of a replica for a prompt, and how much of the prompt that replica has cached."""

    choice: Choice
    matched: Matched


class Router:
    """The known state of all replicas, and the choice of a replica for each prompt.

    The state comes from the replicas' KV events and from the prompts that were sent to them. Owned by the event loop.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        index: IndexConfig,
        fingerprints: Fingerprints | None = None,
        on_dead: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Create a router without replicas.

        *on_dead* is called with the name of each replica that has died, after the router has forgotten its prefixes.
        """
        self.index = PrefixIndex(fingerprints or Fingerprints(), index.max_blocks)
        self.sessions = Sessions(index.max_sessions)
        self._replicas: dict[str, Replica] = {}
        self._on_dead = on_dead
        self._policy = RoutingPolicy(policy)
        self._first_tokens = policy.first_tokens
        self._ring = HashRing([])

    @property
    def replicas(self) -> Mapping[str, Replica]:
        """Current replicas by name."""
        return self._replicas

    def add(self, replica: Replica) -> None:
        """Add a replica, whose name must be new."""
        assert replica.name not in self._replicas, "a replica with this name exists already"
        self._replicas[replica.name] = replica
        self._ring = HashRing(sorted(self._replicas))
        self.index.add(replica.name)

    def remove(self, name: str) -> None:
        """Remove a replica, and forget its prefixes and conversations."""
        del self._replicas[name]
        self._ring = HashRing(sorted(self._replicas))
        self.index.remove(name)
        self.sessions.forget(name)

    def prompt(self, question: Question, tokens: TokenArray | None, salt: str | None, who: str) -> RoutedPrompt:
        """Return the question's prompt in the form in which the index looks it up.

        Args:
            question: The prompt of a request.
            tokens: The prompt's token ids. If None, the prompt's text is compared with earlier texts of the client.
            salt: The salt in the hashes of the prompt's blocks.
            who: The header with the client's credentials. Texts of different clients are not compared.
        """
        if tokens is None or not self.index.block_sizes:
            return self._by_text(question, len(tokens) if tokens is not None else None, who)
        fingerprints = self.index.fingerprints
        root = fingerprints.root(question.model if question.model in self.index.loras else None, salt)
        looked_at = tokens[:MAX_TOKENS]
        views = [Prefixes(fingerprints.chain(root, looked_at, size), size) for size in sorted(self.index.block_sizes)]
        first = views[0].fingerprints[: max(1, self._first_tokens // int(views[0].step_tokens))]
        ring_key = first[-1].to_bytes(8, "big") if first else looked_at.tobytes()
        return RoutedPrompt(len(tokens), views, ring_key, question.session)

    def _by_text(self, question: Question, num_tokens: int | None, who: str) -> RoutedPrompt:
        fingerprints = self.index.fingerprints
        root = fingerprints.root("text", question.model, question.salt, who)
        text = np.frombuffer(question.text[:MAX_TEXT], dtype=np.uint8)
        prefixes = fingerprints.chain(root, text, TEXT_STEP)
        first = question.text[: int(self._first_tokens * BYTES_PER_TOKEN)]
        length = int(len(question.text) / BYTES_PER_TOKEN) if num_tokens is None else num_tokens
        return RoutedPrompt(length, [Prefixes(prefixes, TEXT_STEP / BYTES_PER_TOKEN)], first, question.session)

    def matched(self, prompt: RoutedPrompt) -> Mapping[str, Matched]:
        """Return how much of the prompt each replica has cached. Replicas that have nothing of it are left out.

        The prompt is looked up once for each block size that replicas use. A replica's longest match counts.
        """
        best: dict[str, Matched] = {}
        for view in prompt.views:
            for name, matched in self.index.matched(view).items():
                if matched.total > best.get(name, NOTHING).total:
                    best[name] = matched
        return best

    def choose(self, prompt: RoutedPrompt, tried: Collection[str] = ()) -> Routed | None:
        """Return the best open replica for the prompt, except those in *tried*; None if no other replica is open."""
        matched = self.matched(prompt)
        candidates = [
            Candidate(name, matched.get(name, NOTHING), replica.load, replica.is_open and name not in tried)
            for name in self._ring.order(prompt.ring_key)
            for replica in [self.replicas[name]]
        ]
        session = None if prompt.session is None else self.sessions.replica_of(prompt.session)
        choice = self._policy.choose(prompt.num_tokens, candidates, session)
        return None if choice is None else Routed(choice, matched.get(choice.name, NOTHING))

    def sent(self, prompt: RoutedPrompt, name: str) -> None:
        """Record that the prompt was sent to the replica *name*, which should soon have it cached."""
        if prompt.views:
            self.index.expect(name, prompt.views[0])
        if prompt.session is not None:
            self.sessions.keep(prompt.session, name)

    def refused(self, prompt: RoutedPrompt, name: str) -> None:
        """Record that the replica *name* will not compute a prompt that was sent to it."""
        if prompt.views:
            self.index.expect_no_longer(name, prompt.views[0])

    def any_open(self, key: bytes, tried: Collection[str] = ()) -> str | None:
        """Return an open replica for a request without a prompt, or None if there is none.

        The same *key* always gets the same replica while that replica is open.
        """
        order = self._ring.order(key)
        return next((name for name in order if self.replicas[name].is_open and name not in tried), None)

    def learn(self, name: str, batch: EventBatch) -> None:
        """Apply a batch of KV events of the replica *name*."""
        for event in batch.events:
            self.index.learn(name, event)

    def forget(self, name: str) -> None:
        """Forget the prefixes of the replica *name*."""
        self.index.forget(name)

    def mark_dead(self, name: str) -> None:
        """Mark the replica *name* as dead, and forget its prefixes and conversations."""
        replica = self.replicas[name]
        if replica.health is not Health.DEAD:
            replica.health = Health.DEAD
            self.index.forget(name)
            self.sessions.forget(name)
            self._on_dead(name)
