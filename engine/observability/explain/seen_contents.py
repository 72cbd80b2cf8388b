"""SeenContents: under which salts, adapters and namespaces the beginnings of prompts were seen, in digests."""

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvtier.engine.observability.explain.prompt_print import KEY_BYTES
from kvtier.store.folder import open_own

NUM_CONTENTS = 1 << 15
NUM_WAYS = 8  # in which one of them was seen, the newest
NUM_NAMESPACES = 256


class Way(NamedTuple):
    """Everything beside its tokens that a prompt's first block was named with. Salts are digests."""

    salt: bytes
    adapter: str
    namespace: str  # a name for it; the fields that it stands for are kept once
    tenant: str | None  # of the API key: what is told to whom

    def may_learn_of(self, other: "Way") -> bool:
        """Return whether a request of this way may be told that there was one of the *other* way.

        A tenant with an API key is told of all its salts. Without keys only salts tell clients apart, so nothing is
        told of requests with another salt: else a client without that salt could try what their prompts were.
        """
        return other.tenant == self.tenant and (self.tenant is not None or other.salt in (b"", self.salt))


class _Kept(msgspec.Struct):
    """What is written to disk."""

    key: bytes
    namespaces: dict[str, dict[str, str]]
    contents: list[tuple[bytes, list[Way]]]


class SeenContents:
    """Bounded: the contents that were seen least lately go. Owned by one thread."""

    def __init__(self, key: bytes) -> None:
        """*key*: the secret of all digests, which goes where they go."""
        self.key = key
        self._ways: OrderedDict[bytes, dict[Way, int]] = OrderedDict()  # with when it was seen first
        self.num_added = 0  # so far: a time, for `differing`
        self._namespaces: OrderedDict[str, Mapping[str, str]] = OrderedDict()

    def add_namespace(self, name: str, fields: Mapping[str, str]) -> None:
        """Say which fields a namespace stands for."""
        self._namespaces[name] = dict(fields)
        self._namespaces.move_to_end(name)
        if len(self._namespaces) > NUM_NAMESPACES:
            self._namespaces.popitem(last=False)

    def add(self, content: bytes, way: Way) -> None:
        """Take in that this content was seen in this way."""
        ways = self._ways.setdefault(content, {})
        ways[way] = ways.pop(way, self.num_added)
        self.num_added += 1
        if len(ways) > NUM_WAYS:
            del ways[next(iter(ways))]
        self._ways.move_to_end(content)
        if len(self._ways) > NUM_CONTENTS:
            self._ways.popitem(last=False)

    def differing(self, content: bytes, way: Way, before: int) -> list[str]:
        """The fields in which another way differs from *way* in which the content was seen *before* that many were
        added; of several that of the one most like it: `cache_salt`, `adapter`, and fields of the namespace.

        Empty if there is none that the asker may learn of, see `Way.may_learn_of`.
        """
        ways = [
            other
            for other, first_at in self._ways.get(content, {}).items()
            if first_at < before and way.may_learn_of(other)
        ]
        found = [self._fields(way, other) for other in ways if other != way]
        return min(reversed(found), key=len, default=[])

    def save(self, path: Path) -> None:
        """Write it to *path*, for this user only. OSError."""
        kept = _Kept(
            self.key,
            {name: dict(fields) for name, fields in self._namespaces.items()},
            [(content, list(ways)) for content, ways in self._ways.items()],
        )
        new = path.with_name(f"{path.name}.new")
        with suppress(FileNotFoundError):
            new.unlink()
        with open(new, "xb", opener=open_own) as file:
            file.write(msgspec.msgpack.encode(kept))
        new.replace(path)

    @classmethod
    def load(cls, path: Path, new_key: bytes) -> "SeenContents":
        """Return what was saved at *path*; empty, and with the new key, if nothing was, or only what cannot be trusted:
        another user's file, one behind a link, or no such content."""
        try:
            with open(path, "rb", opener=open_own) as file:
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
