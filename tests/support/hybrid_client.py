"""A worker of an engine with two KV cache groups at LMCache's endpoint: all chunks of one, two of the other."""

from collections.abc import Sequence
from typing import Any

from lmcache_bed import CHUNK, REGISTRATION, RawClient, content, key

FULL = {
    "num_layers": 2,
    "hidden_dim_size": 16,
    "dtype_str": "bfloat16",
    "tokens_per_block": 4,
    "window_tokens": CHUNK,
    "kv_size": 1,
    "window_chunks": 0,
    "recurrent": False,
}
WINDOW = {**FULL, "num_layers": 4, "hidden_dim_size": 8, "dtype_str": "float32", "window_chunks": 2, "kv_size": 2}
GROUPS = (FULL, WINDOW)
NUM_BYTES = (2 * CHUNK * 16 * 2, 2 * 4 * CHUNK * 8 * 4)
SHAPES = ([2, CHUNK, 16], [2, 4, CHUNK, 8])
WINDOW_CHUNKS = 2


class HybridClient(RawClient):
    """A `RawClient` whose workers have both groups."""

    def register(self, **changed: Any) -> Any:
        return self.ask("register", {**REGISTRATION, "group_layouts": GROUPS, **changed})

    def store_parts(
        self, tokens: Sequence[int], request: str, skipped: Sequence[int] = (), instance: int = 1, **more: Any
    ) -> list[tuple[int, int]]:
        """Store what is wanted, but for the *skipped* chunks of the window; which parts were, by group and chunk."""
        own = key(tokens, request, **more)
        context = self.ask("prepare_store", own, instance, [[], list(skipped)] if skipped else [])["context"]
        self.write(context, own)
        if context["slots"]:
            assert self.ask("commit_store", own, instance, b"") is True
        return list(zip(context["group_ids"], context["chunk_indices"], strict=True))

    def write(self, context: Any, own: dict[str, Any]) -> None:
        parts = zip(context["slots"], context["group_ids"], context["chunk_indices"], strict=True)
        for slot, group, index in parts:
            chunk = own["start"] // CHUNK + index
            expected = content(own["token_ids"], chunk, own["worker_id"], group, NUM_BYTES[group])
            self._bed.bytes_of(slot, NUM_BYTES[group])[:] = expected

    def retrieve(self, tokens: Sequence[int], request: str, instance: int = 1, **more: Any) -> bool:
        """Load the chunks; whether just the parts came that LMCache's client takes. What comes is what was stored."""
        own = key(tokens, request, **more)
        answer = self.ask("prepare_retrieve", own, instance)
        first, num_chunks = own["start"] // CHUNK, (own["end"] - own["start"]) // CHUNK
        context = answer["context"] if answer["success"] else {"slots": [], "group_ids": [], "chunk_indices": []}
        parts = list(zip(context["slots"], context["group_ids"], context["chunk_indices"], strict=True))
        are_good = [
            bytes(self._bed.bytes_of(slot, NUM_BYTES[group]))
            == content(tokens, first + index, own["worker_id"], group, NUM_BYTES[group])
            for slot, group, index in parts
        ]
        assert self.ask("commit_retrieve", own, instance) is True
        windows = [(0, range(num_chunks)), (1, range(max(0, num_chunks - WINDOW_CHUNKS), num_chunks))]
        expected = [(group, index) for group, indices in windows for index in indices]
        assert all(are_good), "a load gave wrong bytes"
        return [(group, index) for _, group, index in parts] == expected
