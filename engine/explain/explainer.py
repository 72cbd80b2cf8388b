"""Explainer: remembers requests that have ended, and says block by block why their prompts were found or not."""

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from kvtier.engine.explain.explanation import Departure, Explanation, Row, Why
from kvtier.engine.explain.known_prompts import KnownPrompts
from kvtier.engine.explain.past_requests import Past, PastRequests
from kvtier.engine.explain.prompt_print import KEY_BYTES, PromptPrint, PromptPrinter
from kvtier.engine.explain.seen_contents import SeenContents, Way
from kvtier.engine.records.request_record import RequestRecord
from kvtier.engine.records.trail import Trail
from kvtier.tiers.device.ghosts import Ghost, Ghosts
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import BlockChain, BlockName
from kvtier.tiers.naming.namespace import Namespace
from kvtier.tiers.naming.tier import Reason, Tier

log = logging.getLogger(__name__)

MOST_FIELD = 64  # characters
NUM_DURING = 4  # requests that are named with an eviction
_TIERS = tuple(Tier)
_LOST = frozenset({Reason.NEVER_SEEN, *(Reason.evicted_from(tier) for tier in Tier)})


class Explainer:
    """Bounded, and names and numbers only: digests, blocks' names, and 16 bits of a hash for each token. Owned by the
    thread that records are made in."""

    def __init__(
        self,
        block_size: int,
        namespace: Mapping[str, str],
        clock: Callable[[], float],
        *,
        path: Path | None = None,
        block_steps: Sequence[int] = (1,),
        notes: Sequence[str] = (),
    ) -> None:
        """*namespace*: the fields that decide a block's bytes beside its prompt. *path*: a file by which the next
        process knows what was seen. *block_steps*: of each attention group, how many names a block of it spans. *notes*
        say what cannot be known here."""
        self.block_size = block_size
        self._notes = tuple(notes)
        self._clock = clock
        self._path = path
        self._steps = sorted(set(block_steps))
        self._known = KnownPrompts()
        self._past = PastRequests()
        key = os.urandom(KEY_BYTES)
        self._seen = SeenContents(key) if path is None else SeenContents.load(path, key)
        self._printer = PromptPrinter(block_size, self._seen.key)
        self._namespace = self.namespace_of(namespace)

    def namespace_of(self, fields: Mapping[str, str]) -> str:
        """A name for the namespace with these fields; an engine has one, a sidecar several."""
        name = "/".join(f"{key}={fields[key]}" for key in sorted(fields))
        self._seen.add_namespace(name, fields)
        return name

    def on_ended(
        self,
        record: RequestRecord,
        trail: Trail,
        chain: BlockChain,
        ghosts: Ghosts,
        namespace: str | None = None,
    ) -> None:
        """Remember a request that has ended. *chain* has its prompt's tokens, *ghosts* what its tiers have lost."""
        namespace = self._namespace if namespace is None else namespace
        prompt = self._printer.print_of(chain, trail.names, record.tokens.num_tokens, namespace)
        way = Way(prompt.salt, prompt.adapter, namespace, record.tenant)
        self._past.add(Past(record, trail, prompt, way, ghosts, self._known.num_added, self._seen.num_added))
        self._known.add(prompt)
        if Reason.ABORTED not in record.tokens.reasons:
            for content in prompt.contents.values():
                self._seen.add(content, way)

    def explain(self, request_id: str, tenant: str | None, same_messages: Sequence[str] = ()) -> list[Explanation]:
        """Why the prompts of the request were found or not, one for each of its completions; none if it is not known,
        or another tenant's. *same_messages*: ids of requests that began with the same message of a chat."""
        return [
            self._explained(past, self._is_other_text(past, same_messages))
            for past in self._past.find(request_id)
            if past.record.tenant == tenant
        ]

    def explain_now(
        self,
        trail: Trail,
        chain: BlockChain,
        ghosts: Ghosts,
        tiers: Sequence[Tier | None],
        num_tokens: int,
        tenant: str | None,
        namespace: str | None = None,
        same_messages: Sequence[str] = (),
    ) -> Explanation:
        """What would be found of a prompt now, and why not more. *tiers*: where each of its blocks is."""
        namespace = self._namespace if namespace is None else namespace
        prompt = self._printer.print_of(chain, trail.names, num_tokens, namespace)
        way = Way(prompt.salt, prompt.adapter, namespace, tenant)
        record = RequestRecord("", tenant, None, time.time(), TokenBalance(recomputed=num_tokens))
        past = Past(record, trail, prompt, way, ghosts, self._known.num_added, self._seen.num_added)
        found = self._explained(past, self._is_other_text(past, same_messages), tiers)
        return replace(found, request_id=None, arrived_at=None)

    def is_prompt_of(self, request_id: str, chain: BlockChain, num_tokens: int, tenant: str | None) -> bool:
        """Whether the request had this very prompt."""
        pasts = [past for past in self._past.find(request_id) if past.record.tenant == tenant]
        for past in pasts:
            own = self._printer.print_of(chain, chain.names, num_tokens, past.way.namespace)
            if past.prompt.num_tokens == num_tokens and _marked(past.prompt) == _marked(own):
                return True
        return False

    def close(self) -> None:
        """Write what was seen to the file, if there is one. Where that fails the next process explains less."""
        if self._path is None:
            return
        try:
            self._seen.save(self._path)
        except OSError as error:
            log.info("explain: what was seen could not be written (%s)", error)

    def _is_other_text(self, own: Past, same_messages: Sequence[str]) -> bool:
        """Whether an earlier request of the same tenant with the same messages had another first block."""
        pasts = [past for request_id in same_messages for past in self._past.find(request_id)]
        return any(
            past.before < own.before
            and past.record.tenant == own.record.tenant
            and past.prompt.contents.get(1) != own.prompt.contents.get(1)
            for past in pasts
        )

    def _explained(self, past: Past, is_other_text: bool, tiers: Sequence[Tier | None] = ()) -> Explanation:
        record, trail = past.record, past.trail
        num_tokens = past.prompt.num_tokens
        rows = [*_hit_rows(trail), *self._missed_rows(past, is_other_text, tiers)]
        nearest = self._known.nearest(past.prompt, len(trail.depths), past.before)
        explanation = Explanation(
            record.request_id,
            record.arrived_at,
            num_tokens,
            trail.block_size,
            tuple(_merged(rows)),
            None if nearest is None else Departure(nearest.num_shared, nearest.departs),
            self._notes,
        )
        explanation.check()
        return explanation

    def _missed_rows(self, past: Past, is_other_text: bool, tiers: Sequence[Tier | None]) -> list[Row]:
        """A row for each block that was not taken from the cache, and for what is no full block."""
        trail, num_tokens, size = past.trail, past.prompt.num_tokens, past.trail.block_size
        ghosts = self._lost(past)
        was_known = self._known.has_all(past.prompt, past.before).tolist()
        ways = self._other_ways(past, is_other_text)
        start = len(trail.depths) * size + trail.num_copied
        rows = []
        while start < num_tokens:
            block = start // size
            reason, until = _reason_at(past, start)
            end = min((block + 1) * size, num_tokens, until)
            row = Row(start, end, None, Why.SHORT if num_tokens < size else reason)
            if row.why in _LOST and block < len(trail.names):
                if block < len(tiers) and tiers[block] is not None:
                    row = replace(row, why=Why.BEHIND)
                elif (ghost := ghosts[block]) is not None:
                    row = self._evicted_row(past, row, ghost)
                elif was_known[block]:
                    row = replace(row, why=Why.FORGOTTEN)
                else:
                    row = replace(row, **ways[block])
            rows.append(row)
            start = end
        return rows

    def _evicted_row(self, past: Past, row: Row, ghost: Ghost) -> Row:
        """How the row's block was evicted, and which of the asker's own requests ran then."""
        at = time.time() - (self._clock() - ghost.at)
        during = [
            each.request_id
            for each in self._past.running_at(at)
            if each.tenant == past.record.tenant and each is not past.record and each.request_id
        ]
        return replace(
            row,
            why=Reason.evicted_from(ghost.tier),
            cause=ghost.cause,
            evicted_at=(at, at),
            during=tuple(dict.fromkeys(during))[-NUM_DURING:],
        )

    def _other_ways(self, past: Past, is_other_text: bool) -> list[dict[str, Any]]:
        """For each full block what is said of it if it was never seen under its name."""
        if is_other_text:
            return [{"why": Why.OTHER_TEMPLATE, "differs": ("template",)} for _ in past.trail.names]
        found: list[dict[str, Any]] = [{"why": Reason.NEVER_SEEN} for _ in past.trail.names]
        for num_blocks, content in past.prompt.contents.items():
            differing = self._seen.differing(content, past.way, past.seen_before)
            if not differing:
                break
            found[:num_blocks] = [{"why": Why.OTHER, "differs": tuple(differing)}] * num_blocks
        return found

    def _lost(self, past: Past) -> list[Ghost | None]:
        """For each full block how it was lost before the request looked for it, in any attention group."""
        names, before = past.trail.names, past.trail.as_of or math.inf
        found: list[Ghost | None] = [None for _ in names]
        for step in self._steps:
            of_group: Sequence[BlockName] = names[step - 1 :: step]
            for place, ghost in enumerate(past.ghosts.find_all(of_group, before) if of_group else ()):
                for block in range(place * step, (place + 1) * step):
                    known = found[block]
                    if ghost is not None and (known is None or known.at < ghost.at):
                        found[block] = ghost
        return found


def namespace_fields(namespace: Namespace) -> dict[str, str]:
    """The fields of a namespace by which another one is told from it; what may be long or secret as a digest."""
    fields = {name: str(value) for name, value in asdict(namespace).items()}
    return {
        name: value if len(value) <= MOST_FIELD and name != "hash_seed" else hashlib.sha256(value.encode()).hexdigest()
        for name, value in fields.items()
    }


def _marked(prompt: PromptPrint) -> bytes:
    return prompt.parents.tobytes() + prompt.marks.tobytes()


def _hit_rows(trail: Trail) -> list[Row]:
    size = trail.block_size
    rows = [
        Row(block * size, (block + 1) * size, _TIERS[depth])
        if depth < len(_TIERS)
        else Row(block * size, (block + 1) * size, None, Reason.COST)
        for block, depth in enumerate(trail.depths)
    ]
    if trail.num_copied:
        start = len(trail.depths) * size
        rows.append(Row(start, start + trail.num_copied, Tier.DEVICE, is_copied=True))
    return rows


def _reason_at(past: Past, token: int) -> tuple[Reason, int]:
    """Why the token was computed, and up to which token that holds."""
    if Reason.ABORTED in past.record.tokens.reasons:
        return Reason.ABORTED, past.prompt.num_tokens
    for end, reason in past.trail.misses:
        if end > token:
            return reason, end
    return Reason.LAST_BLOCK, past.prompt.num_tokens


def _merged(rows: Sequence[Row]) -> list[Row]:
    """Rows that follow each other and say the same as one; of evictions the first and the last time."""
    merged = []
    for _, group in groupby(rows, lambda row: (row.tier, row.why, row.cause, row.differs, row.is_copied)):
        same = list(group)
        times = [each.evicted_at for each in same if each.evicted_at is not None]
        merged.append(
            replace(
                same[0],
                end=same[-1].end,
                evicted_at=(min(t[0] for t in times), max(t[1] for t in times)) if times else None,
                during=tuple(dict.fromkeys(each for row in same for each in row.during))[:NUM_DURING],
            )
        )
    return merged
