"""Explainer: remembers finished requests, and provides evidence of why their prompts were hits or misses."""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from kvtier.engine.observability.explain.evidence import Evidence
from kvtier.engine.observability.explain.known_prompts import KnownPrompts
from kvtier.engine.observability.explain.past_requests import Past, PastRequests
from kvtier.engine.observability.explain.prompt_print import KEY_BYTES, PromptFingerprint, PromptPrinter
from kvtier.engine.observability.explain.seen_contents import SeenContents, Way
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.trail import Trail
from kvtier.tiers.device.ghosts import Ghosts
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.namespace import Namespace
from kvtier.tiers.naming.tier import Reason, Tier

log = logging.getLogger(__name__)

MAX_FIELD = 64  # characters


class Explainer:
    """A bounded memory of finished requests, from which their hits and misses can be explained.

    It holds digests, block names, and 16 bits of a hash per token, but no text. Owned by the thread that creates the
    records.
    """

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
        """Create the explainer, and load the digests of prompts that an earlier process saved at *path*.

        Args:
            block_size: Number of tokens per block name.
            namespace: The fields that determine a block's bytes in addition to its prompt.
            clock: The clock of the tiers, in seconds.
            path: The file in which `close` saves the digests for the next process; None to keep them in memory only.
            block_steps: For each attention group, the size of its blocks as a multiple of *block_size*.
            notes: Sentences about what explanations cannot tell, included in every explanation.
        """
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
        """Register the namespace with these fields, and return its name. A sidecar has several namespaces."""
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
        """Remember a finished request.

        *chain* holds the tokens of its prompt. *ghosts* are the blocks that the request's tiers have evicted.
        *namespace* is a name returned by `namespace_of`; None stands for the namespace of the constructor.
        """
        namespace = self._namespace if namespace is None else namespace
        prompt = self._printer.fingerprint_of(chain, trail.names, record.tokens.num_tokens, namespace)
        way = Way(prompt.salt, prompt.adapter, namespace, record.tenant)
        # Requests that ended after this one was looked up do not count as earlier: both may have computed the same new
        # tokens at the same time.
        before = self._known.num_before(trail.as_of) if trail.as_of else self._known.num_added
        self._past.add(Past(record, trail, prompt, way, ghosts, before, self._seen.num_added))
        self._known.add(prompt, self._clock())
        if Reason.ABORTED not in record.tokens.reasons:
            for content in prompt.contents.values():
                self._seen.add(content, way)

    def find(self, request_id: str, tenant: str | None) -> list[Past]:
        """Return the tenant's newest requests with this id, possibly none.

        If an HTTP request asks for several completions, each of them is a request with the same id.
        """
        return self._past.find(request_id, tenant)

    def evidence(self, past: Past, same_messages: Sequence[str] = ()) -> Evidence:
        """Return the evidence of why the prompt of a request was a hit or a miss. Takes a fraction of a millisecond.

        Args:
            past: The request, from `find`.
            same_messages: Ids of requests that began with the same chat message.
        """
        return self._evidence(past, same_messages, (), is_new=False)

    def evidence_now(
        self,
        trail: Trail,
        chain: BlockChain,
        ghosts: Ghosts,
        tiers: Sequence[Tier | None],
        num_tokens: int,
        tenant: str | None,
        namespace: str | None = None,
        same_messages: Sequence[str] = (),
    ) -> Evidence:
        """Return the evidence of why a prompt would be a hit or a miss if it were sent now.

        *tiers* has for each block the tier that holds it, or None.
        """
        namespace = self._namespace if namespace is None else namespace
        prompt = self._printer.fingerprint_of(chain, trail.names, num_tokens, namespace)
        way = Way(prompt.salt, prompt.adapter, namespace, tenant)
        record = RequestRecord("", tenant, None, time.time(), TokenBalance(recomputed=num_tokens))
        past = Past(record, trail, prompt, way, ghosts, self._known.num_added, self._seen.num_added)
        return self._evidence(past, same_messages, tiers, is_new=True)

    def is_prompt_of(self, past: Past, chain: BlockChain, num_tokens: int) -> bool:
        """Return whether the request had exactly this prompt. Any thread may call this."""
        if past.prompt.num_tokens != num_tokens:
            return False
        own = self._printer.fingerprint_of(chain, chain.names, num_tokens, past.way.namespace)
        return _marked(past.prompt) == _marked(own)

    def close(self) -> None:
        """Save the digests of prompts to the file, if there is one. If that fails, log it."""
        if self._path is None:
            return
        try:
            self._seen.save(self._path)
        except OSError as error:
            log.info("explain: the digests of earlier prompts could not be saved for the next process (%s)", error)

    def _evidence(
        self, past: Past, same_messages: Sequence[str], tiers: Sequence[Tier | None], *, is_new: bool
    ) -> Evidence:
        return Evidence(
            past,
            is_new,
            self._known.older(past.before),
            past.ghosts.copy(),
            self._other_ways(past),
            self._is_other_text(past, same_messages),
            tiers,
            self._past.all(),
            time.time() - self._clock(),
            self._steps,
            self._notes,
        )

    def _is_other_text(self, own: Past, same_messages: Sequence[str]) -> bool:
        """Return whether an earlier request had the same first chat message as *own*, but another first block.

        The chat template probably rendered the message differently. Only earlier requests that the client may know of
        are considered, see `Way.may_see`.
        """
        pasts = [past for request_id in same_messages for past in self._past.find(request_id, own.record.tenant)]
        return any(
            past.before < own.before
            and own.way.may_see(past.way)
            and past.prompt.contents.get(1) != own.prompt.contents.get(1)
            for past in pasts
        )

    def _other_ways(self, past: Past) -> list[tuple[int, tuple[str, ...]]]:
        """Return which beginnings of the prompt were seen before, but under other block names.

        Each pair has the number of blocks in the beginning, and the fields (such as the salt) that differed.
        """
        found = []
        for num_blocks, content in past.prompt.contents.items():
            differing = self._seen.differing(content, past.way, past.seen_before)
            if not differing:
                break
            found.append((num_blocks, tuple(differing)))
        return found


def namespace_fields(namespace: Namespace) -> dict[str, str]:
    """Return the fields that identify a namespace, with long or secret values replaced by digests."""
    fields = {name: str(value) for name, value in asdict(namespace).items()}
    return {
        name: value if len(value) <= MAX_FIELD and name != "hash_seed" else hashlib.sha256(value.encode()).hexdigest()
        for name, value in fields.items()
    }


def _marked(prompt: PromptFingerprint) -> bytes:
    return prompt.parents.tobytes() + prompt.marks.tobytes()
