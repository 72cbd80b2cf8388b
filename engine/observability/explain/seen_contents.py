"""SeenContents: a memory of prompt prefixes, and of the salts, adapters and namespaces sent with each of them."""

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtier.engine.observability.explain.prompt_print import KEY_BYTES
from kvtier.store.folder import open_private

NUM_CONTENTS = 1 << 15
NUM_WAYS = 8  # ways kept for each content, the newest
NUM_NAMESPACES = 256


class Way(NamedTuple):
    """A salt, adapter and namespace with which a prompt was seen, and the tenant that sent it.

    Salt, adapter, namespace and tokens determine the names of the prompt's blocks. The salt is stored as a digest.
    """

    salt: bytes
    adapter: str
    namespace: str  # its name; `SeenContents` maps it to its fields
    tenant: str | None  # of the API key; decides who may learn of this way

    def may_see(self, other: "Way") -> bool:
        """Return whether a client with this tenant and salt may learn of a request with the *other* tenant and salt.

        A tenant with an API key may learn of all its own requests. Without API keys, only salts separate clients. A
        client may then learn only of requests with its own salt or without a salt. Otherwise, it could guess prompts
        sent with another client's salt.
        """
        return other.tenant == self.tenant and (self.tenant is not None or other.salt in (b"", self.salt))


class _Kept(msgspec.Struct):
    """The content of the file that `SeenContents.save` writes."""

    key: bytes
    namespaces: dict[str, dict[str, str]]
    contents: list[tuple[bytes, list[Way]]]


class SeenContents:
    """A bounded LRU memory of the beginnings of prompts, and of the ways in which they were seen.

    For each beginning, only a digest of its tokens is stored, called the *content*. A `Way` is the salt, adapter
    and namespace of a request with this beginning. Owned by one thread.
    """

    def __init__(self, key: bytes) -> None:
        """Create a memory without prompts. *key* is the secret key of the digests that callers pass to `add`."""
        self.key = key
        self._ways: OrderedDict[bytes, dict[Way, int]] = OrderedDict()  # by content, each way's `num_added` when added
        self.num_added = 0  # number of calls of `add`; identifies a moment for `differing`
        self._namespaces: OrderedDict[str, Mapping[str, str]] = OrderedDict()

    def add_namespace(self, name: str, fields: Mapping[str, str]) -> None:
        """Record the fields of a namespace."""
        self._namespaces[name] = dict(fields)
        self._namespaces.move_to_end(name)
        if len(self._namespaces) > NUM_NAMESPACES:
            self._namespaces.popitem(last=False)

    def add(self, content: bytes, way: Way) -> None:
        """Record that a prompt with this content was sent with the salt, adapter and namespace of *way*."""
        ways = self._ways.setdefault(content, {})
        ways[way] = ways.pop(way, self.num_added)
        self.num_added += 1
        if len(ways) > NUM_WAYS:
            del ways[next(iter(ways))]
        self._ways.move_to_end(content)
        if len(self._ways) > NUM_CONTENTS:
            self._ways.popitem(last=False)

    def differing(self, content: bytes, way: Way, before: int) -> list[str]:
        """Return the fields in which a request differs from the most similar earlier request with the same tokens.

        *content* is the digest of these tokens. *way* has the request's fields: its salt, adapter and namespace.
        Only the first *before* requests that were added count as earlier. Requests that the client may not know of (see
        `Way.may_see`) are ignored, and so are those with equal fields. If no request is left, the list is empty.
        """
        ways = [
            other for other, first_at in self._ways.get(content, {}).items() if first_at < before and way.may_see(other)
        ]
        found = [self._fields(way, other) for other in ways if other != way]
        return min(reversed(found), key=len, default=[])

    def save(self, path: Path) -> None:
        """Write the memory and its key to the file *path*, readable only by this user. Raise OSError if that fails."""
        kept = _Kept(
            self.key,
            {name: dict(fields) for name, fields in self._namespaces.items()},
            [(content, list(ways)) for content, ways in self._ways.items()],
        )
        new = path.with_name(f"{path.name}.new")
        with suppress(FileNotFoundError):
            new.unlink()
        with open(new, "xb", opener=open_private) as file:
            file.write(msgspec.msgpack.encode(kept))
        new.replace(path)

    @classmethod
    def load(cls, path: Path, new_key: bytes) -> "SeenContents":
        """Load a memory and its key from the file *path*, written by `save`.

        If the file is missing, malformed, a link or another user's, return an empty memory with the key *new_key*.
        """
        try:
            with open(path, "rb", opener=open_private) as file:
                kept = msgspec.msgpack.decode(file.read(), type=_Kept)
        except (OSError, msgspec.MsgspecError):
            return cls(new_key)
        found = cls(kept.key if len(kept.key) == KEY_BYTES else new_key)
        for name, fields in kept.namespaces.items():
            found.add_namespace(name, fields)
        for content, ways in kept.contents:
            for way in ways:
                found.add(content, way)
        return found

    def _fields(self, way: Way, other: Way) -> list[str]:
        differ = ["cache_salt"] if other.salt != way.salt else []
        differ += ["adapter"] if other.adapter != way.adapter else []
        if other.namespace != way.namespace:
            own, its = self._namespaces.get(way.namespace, {}), self._namespaces.get(other.namespace, {})
            names = [name for name in own if own[name] != its.get(name)]
            differ += [f"namespace: {name}" for name in names] or ["namespace"]
        return differ
