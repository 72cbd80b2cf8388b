"""EngineCore: the model, the cache and the scheduler, advanced step by step by the one thread that owns them."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from kvtier.engine.attached.link import SidecarStanding
from kvtier.engine.attached.sidecar_tiers import SidecarTiers
from kvtier.engine.config import Config
from kvtier.engine.fault_log import FaultLog, flush_fault
from kvtier.engine.images.engine_images import Images, ImageStatistics, ImageUse
from kvtier.engine.images.prompt_images import PromptImages
from kvtier.engine.kv_events import ZmqPublisher
from kvtier.engine.model.drawing.draws import sample_tokens
from kvtier.engine.model.drawing.token_bans import TokenBans
from kvtier.engine.model.logprobs import step_logprobs
from kvtier.engine.model.runner import Chunk, ModelRunner
from kvtier.engine.model.sampling import InvalidParameter, SamplingParams
from kvtier.engine.model.sampling_defaults import SamplingDefaults
from kvtier.engine.model.structured.grammar import Grammar, GrammarState
from kvtier.engine.model.structured.grammars import Grammars
from kvtier.engine.observability.explain.evidence import Evidence
from kvtier.engine.observability.records.recent_records import RecentRecords
from kvtier.engine.observability.records.request_accounts import RequestAccounts, RequestStatistics
from kvtier.engine.scheduling.request import DEFAULT_OPTIONS, FinishReason, Request, RequestOptions
from kvtier.engine.scheduling.scheduler import Scheduler, Work
from kvtier.engine.scheduling.slot_demand import longest_request
from kvtier.engine.scheduling.step_times import Stall, StepTimes
from kvtier.engine.scheduling.timed_pins import TimedPins
from kvtier.engine.scheduling.timeline import ANONYMOUS, Caller, Timeline
from kvtier.engine.scheduling.trail import Trail
from kvtier.engine.stores.remote_store import OpenRemote, remote_stays
from kvtier.engine.stores.reopening_store import ReopeningStore, StoreStanding
from kvtier.engine.text.detokenizer import Detokenizer
from kvtier.store.codec.cipher import Cipher
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.lower.lower_tiers import Deletion
from kvtier.tiers.lower.statistics import CacheStatistics, PlanStatistics, PrefixStatistics, TokenBalance
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys, HashAlgorithm, Lora
from kvtier.tiers.naming.events import EventLog
from kvtier.tiers.naming.groups import alignment
from kvtier.tiers.naming.named_blocks import tenant_of
from kvtier.tiers.naming.tier import Tier
from kvtier.tiers.up.load_planner import LoadPlanner
from kvtier.tiers.up.promotion import COMPUTED
from kvtier.transfer.block_memory import BlockMemory

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05
STALLED_WAIT_S = 0.002
RESET_WAIT_S = 2.0
SNAPSHOT_EVERY_S = 0.25
FLUSH_TIMEOUT_S = 120.0
CATCH_UP_S = 0.5
SHARE_S = 1.0
MODEL_CHECK_INTERVAL_S = (
    1.0  # how often samples of the model's weights are checked while requests run; a check takes 2 ms
)
NO_PROGRESS_S = 0.1  # if nothing was copied down for this long, the tiers below are full or nothing is left to copy


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A snapshot of an engine's counters and state. It never changes, so any thread may read and keep it."""

    cache: CacheStatistics
    tokens: TokenBalance  # of all admitted prompts
    prefix: PrefixStatistics
    num_dropped_events: int  # batches of KV events that could not be sent
    num_waiting: int
    num_promoting: int
    num_running: int
    tenants: Mapping[str, Mapping[Tier, int]]  # bytes of the tenants with a quota, by name and tier
    host_prepared_bytes: int  # bytes of the host tier that are backed by memory and, with CUDA, page-locked
    plans: PlanStatistics
    store: StoreStanding | None  # None without a disk tier
    sidecar: SidecarStanding | None  # None without a sidecar
    requests: RequestStatistics
    pinned_bytes: int  # bytes that all pins together keep in host memory or load there
    images: ImageStatistics | None  # None if the model sees no images


@dataclass(frozen=True, slots=True)
class Parts:
    """The components of an `EngineCore`, as created and connected by `build_core`."""

    runner: ModelRunner
    memories: Sequence[BlockMemory]  # one for each attention group
    cache: TieredCache
    pins: TimedPins
    planner: LoadPlanner
    scheduler: Scheduler
    namespace: bytes  # digest in the blocks' keys on disk
    step_times: StepTimes
    accounts: RequestAccounts
    load_timeout_s: float
    events: EventLog | None  # None without an [events] table
    publisher: ZmqPublisher | None
    store: ReopeningStore | None  # None without a disk tier
    sidecar: SidecarTiers | None  # the tiers below the device; None if this process has its own
    remote: OpenRemote | None  # None without a remote tier
    sampling_defaults: SamplingDefaults
    images: Images


class EngineCore:
    """An inference engine with a tiered KV cache. Create it with `build_core`; only one thread may use it.

    Call `add` for each request, then `step` until `has_work` is False. The results are in the requests. `close` flushes
    all cached blocks to the disk tier or the sidecar, so that the next engine finds them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: Config, parts: Parts) -> None:
        """Take ownership of *parts*: `close` closes all of them."""
        self.tokenizer = tokenizer
        self.config = config
        self.cache = parts.cache
        self.pins = parts.pins
        self.planner = parts.planner
        self.scheduler = parts.scheduler
        self.publisher = parts.publisher
        self.namespace = parts.namespace
        self._accounts = parts.accounts
        self.explainer = parts.accounts.explainer
        self.runner = parts.runner
        self.grammars = Grammars(tokenizer, parts.runner.vocab_size, parts.runner.end_token_ids)
        self.sampling_defaults = parts.sampling_defaults
        self.images = parts.images
        self._memories = parts.memories
        self._store = parts.store
        self._sidecar = parts.sidecar
        self._remote = parts.remote
        self._events = parts.events
        self._step_times = parts.step_times
        self._stall = Stall(parts.load_timeout_s)
        self.longest_request = longest_request(  # tokens of a prompt and its continuation
            parts.runner.groups, self.cache.free_slots(), config.scheduler.prefill_chunk, parts.runner.max_tokens
        )
        self._closed = False
        self._pid = os.getpid()
        self.check_model_unchanged()
        self._publish_events()  # for the blocks that are already on disk
        self._fault_log = FaultLog(time.monotonic)
        self._take_snapshot()

    @property
    def records(self) -> RecentRecords:
        """Records of recently finished requests."""
        return self._accounts.records

    @property
    def num_waiting(self) -> int:
        """Number of requests that have not started."""
        return len(self.scheduler.waiting)

    @property
    def waiting_prompts(self) -> list[Sequence[int]]:
        """Prompt token ids of the requests that have not started."""
        return [request.prompt_token_ids for request in self.scheduler.waiting]

    @property
    def has_work(self) -> bool:
        """True if any request is not finished."""
        return self.scheduler.has_work

    def pinned_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the blocks that a pin of a prompt's first *num_tokens* tokens keeps.

        A request needs them to resume: the KV of the full blocks, of a sliding window only the last ones, and one
        recurrent state.
        """
        groups = self.runner.groups
        end = num_tokens // alignment(groups) * alignment(groups)
        needed = (end // group.block_size - group.first_needed(end) for group in groups)
        return sum(number * memory.block_bytes for number, memory in zip(needed, self._memories, strict=True))

    @property
    def cipher(self) -> Cipher | None:
        """Cipher of the disk tier; None without encryption or without a disk tier."""
        return None if self._store is None else self._store.settings.cipher

    def add(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        extra: ExtraKeys,
        arrived_at: float,
        options: RequestOptions = DEFAULT_OPTIONS,
        caller: Caller = ANONYMOUS,
        grammar: Grammar | None = None,
        images: PromptImages | None = None,
    ) -> Request:
        """Queue a prompt and return its request.

        *images* are the prompt's images, from `Images.prepare`. Their identities become part of the block names.

        *grammar* is the compiled form of `sampling.structured_outputs`. If it is None, this method compiles it.

        Raises:
            ValueError: If the prompt is empty, has token ids outside the vocabulary or is too long for the model or the
                device. Also if the adapter is not loaded or the queue is full.
            InvalidParameter: If *sampling* names tokens outside the vocabulary, or its grammar cannot be compiled.
            ChangedModel: If the model was changed since it was loaded.
        """
        self._check_open()
        if not self.has_work and time.monotonic() - self._looked_at > MODEL_CHECK_INTERVAL_S:
            self.check_model_unchanged()
        self.runner.refuse_changed()
        self._check_tokens(token_ids, sampling)
        if (worst := max(sampling.logit_bias, default=0)) >= self.runner.vocab_size:
            raise InvalidParameter(
                "logit_bias", f"has token id {worst}; the model knows 0 to {self.runner.vocab_size - 1}"
            )
        if extra.lora is not None and extra.lora not in self.runner.adapters:
            raise ValueError(f"lora {extra.lora.name}: no such adapter is loaded; use a Lora from EngineCore.lora_key")
        if images is not None:
            self.images.check_adapter(extra.lora)
            extra = with_images(extra, images)
        chain = self.chain(token_ids, extra)
        detokenizer = Detokenizer(self.tokenizer, sampling.stop, sampling.min_tokens, sampling.shown_token_ids)
        bans = TokenBans.of(sampling, self.tokenizer, self.runner.end_token_ids, self.runner.vocab_size)
        timeline = Timeline(arrived_at, caller)
        state = self._grammar_state(sampling, grammar)
        request = Request(token_ids, sampling, chain, detokenizer, options, timeline, bans, state)
        request.images = None if images is None else ImageUse(images, extra.cache_salt)
        self.scheduler.add(request)
        self._accounts.on_added(request)
        return request

    def lora_key(self, name: str) -> Lora:
        """Return the key of the adapter *name* for a request's `ExtraKeys`. Any thread may call this.

        The key selects the adapter's weights and is part of the block names.

        Raises:
            ValueError: If no such adapter is loaded.
        """
        for key in self.runner.adapters:
            if key.name == name:
                return key
        there = ", ".join(key.name for key in self.runner.adapters) or "none"
        raise ValueError(f"lora {name}: no such adapter; loaded: {there}; add [lora.{name}] to the configuration")

    def where(self, token_ids: Sequence[int], extra: ExtraKeys) -> dict[str, int]:
        """Return the number of the prompt's tokens in each tier; "nowhere" counts tokens that are not cached.

        A token whose KV is in different tiers for different layers counts for the slowest of these tiers.
        """
        self._check_open()
        block_size = self.config.device.block_size
        counts = dict.fromkeys([*Tier, "nowhere"], 0)
        for tier in self.cache.lookups.where(self.chain(token_ids, extra)):
            counts["nowhere" if tier is None else tier] += block_size
        counts["nowhere"] += len(token_ids) % block_size
        return {str(place): num_tokens for place, num_tokens in counts.items()}

    def explain_prompt(
        self, chain: BlockChain, tenant: str | None = None, same_messages: Sequence[str] = ()
    ) -> Evidence:
        """Return what `Explainer` needs to tell which blocks of a prompt would hit the cache now, and why others miss.

        *chain* holds the names of the prompt's blocks. The cache is not changed.
        """
        num_tokens = len(chain.token_ids)
        hit, tiers = self.scheduler.expected_hit(chain, num_tokens), self.cache.lookups.where(chain)
        depths = bytearray(tier.depth for tier in _warmest_if_none(tiers[: hit.num_blocks]))
        computed = self.cache.plans.computed(hit)
        depths[computed.start : computed.stop] = bytes([COMPUTED]) * len(computed)
        num_copied = 0 if hit.partial is None else hit.partial.num_tokens
        trail = Trail(
            chain.block_size,
            chain.names,
            bytes(depths),
            num_copied,
            hit.misses.reasons,
            num_lasting=hit.misses.num_lasting,
        )
        return self.explainer.evidence_now(trail, chain, tiers, num_tokens, tenant, same_messages)

    def chain(self, token_ids: Sequence[int], extra: ExtraKeys) -> BlockChain:
        """Return the names of a prompt's blocks, as a `BlockChain`. Any thread may call this."""
        names = self.config.names
        algorithm = HashAlgorithm(names.algorithm)
        chain = BlockChain(self.config.device.block_size, extra, algorithm=algorithm, seed=names.seed)
        chain.extend(token_ids)
        return chain

    def reset(self) -> bool:
        """Evict all blocks from device, host memory and disk or, with a sidecar, from device and sidecar.

        First wait up to `RESET_WAIT_S` for in-flight copies. After the eviction, wait until the records on disk are
        deleted. A remote tier keeps its blocks, because other machines share them, so later prompts may still hit them.

        Returns:
            True if the blocks were evicted. False, with nothing evicted, if requests use blocks, if copies do not
            finish in time, or if the disk store is known to fail. Also False if the store fails to delete the records.
            Then this engine no longer finds the blocks, and it retries the deletion. But an engine that starts before
            the deletion is done would find them.
        """
        deadline = time.monotonic() + RESET_WAIT_S
        while not self.begin_reset():
            if not self.cache.num_in_flight or self.scheduler.running or time.monotonic() >= deadline:
                return False
            self.cache.wait(IDLE_WAIT_S)
        while self.cache.deletion is Deletion.IN_PROGRESS:
            self.cache.wait(IDLE_WAIT_S)
        return self.cache.deletion is Deletion.DONE

    def begin_reset(self) -> bool:
        """Evict all blocks as `reset` does, in one short step.

        Later steps (or polls, while the engine is idle) delete the records on disk; see `TieredCache.deletion`. Returns
        False, with nothing evicted, if requests use blocks, if copies are in flight, or if the disk store is known to
        fail.
        """
        self._check_open()
        if self.scheduler.running or self.scheduler.promoting or not self.cache.reset():
            return False
        self.images.clear()
        self.pins.forget_all()  # the reset ended all pins, so callers may pin again up to their limits
        self.scheduler.hit_ratio.forget_recent()
        self._publish_events()
        if self._remote is not None:
            log.info("reset: %s", remote_stays(self._remote.where))
        return True

    def abort(self, request: Request) -> None:
        """Abort a request and release its blocks, unless it has finished."""
        if request.finish_reason is None:
            self.scheduler.abort(request)
            self._accounts.on_ended(request)

    def set_priority(self, request: Request, priority: int) -> None:
        """Change a request's priority, unless it has finished."""
        if request.finish_reason is None:
            self.scheduler.set_priority(request, priority)

    def step(self) -> list[Request]:
        """Compute one batch, and return the requests that got a token or ended.

        The text of the new token is in the request's `new_text`. If every request is waiting for copies or for free
        slots, wait briefly and return an empty list.

        Raises:
            CopyHangs: If no step could compute anything for over a minute, because copies hang and hold the slots.
            ChangedModel: If the model was changed since it was loaded.
        """
        self._check_open()
        if time.monotonic() - self._looked_at > MODEL_CHECK_INTERVAL_S:
            self.check_model_unchanged()
        work = self.scheduler.schedule()
        advanced = self._compute(work) if work else []
        self._stall.look(self.has_work and not work, self.cache.num_in_flight)
        # Start copies down only after the step. On two cores, copies that ran during a short step, such as the one that
        # computes a first token, took longer than the step.
        self._spill()
        self.pins.tick()
        if not work and self.cache.num_in_flight:
            self.cache.wait(IDLE_WAIT_S)
        elif not work and self.has_work:
            # No in-flight copy will free the missing slots; a deadline or an abort will.
            time.sleep(STALLED_WAIT_S)
        self._publish_events()
        self._accounts.trace_spills()
        if not self.has_work or time.monotonic() - self._snapshot_at > SNAPSHOT_EVERY_S:
            self._take_snapshot()
        return advanced

    def idle(self) -> None:
        """Do background work while no request runs: copy cold blocks to lower tiers, end expired pins, and so on."""
        self._check_open()
        self.cache.wait(0.0)
        self._spill()
        self.pins.tick()
        self._publish_events()
        self._accounts.trace_spills()
        self._take_snapshot()

    def check_model_unchanged(self) -> None:
        """Compare samples of the model's weights with samples taken at load. This takes 2 ms.

        If they differ, the engine runs no more requests. `add` and `step` call this at most once per second. Call it
        yourself where your own code may just have changed the model.
        """
        self._looked_at = time.monotonic()
        self.runner.check_unchanged()

    def catch_up(self) -> None:
        """Process the messages that the sidecar has sent since the last step. Without a sidecar, do nothing.

        A sidecar disconnects an engine that has not read its messages for long. If this has happened, wait up to
        `CATCH_UP_S` until the engine is attached again.
        """
        if (sidecar := self._sidecar) is None or not sidecar.is_attached:
            return
        give_up_at, num_seen = time.monotonic() + CATCH_UP_S, -1
        while num_seen != sidecar.status.num_changes or not sidecar.is_told:
            num_seen = sidecar.status.num_changes
            self.cache.poll()
            if time.monotonic() > give_up_at:
                return
            if not sidecar.is_told:
                time.sleep(STALLED_WAIT_S)

    def share(self) -> None:
        """Copy computed blocks to the sidecar for at most a second, so that other engines can use them.

        `step` and `idle` copy blocks too, so this is only needed before a pause in which neither is called. Without a
        sidecar, do nothing.
        """
        if (sidecar := self._sidecar) is None:
            return
        now = moved_at = time.monotonic()
        give_up_at, num_shared = now + SHARE_S, sidecar.status.spill_progress().num_done
        self._spill()
        while self.cache.num_in_flight and now < give_up_at and now - moved_at < NO_PROGRESS_S:
            self.cache.wait(IDLE_WAIT_S)
            self._spill()
            now = time.monotonic()
            if (num_done := sidecar.status.spill_progress().num_done) != num_shared:
                num_shared, moved_at = num_done, now

    def check(self) -> None:
        """Raise AssertionError if an invariant of the cache or the scheduler is violated."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[str]:
        """Run the checks of `check` one at a time, and yield a description of each that passed.

        The caller may step the engine between two checks.
        """
        self._check_open()
        yield from self.cache.checks()
        self.scheduler.check()
        yield f"requests: {len(self.scheduler.running)} running, {len(self.scheduler.waiting)} waiting"
        self._accounts.check()
        yield "request accounts"

    def close(self, progress: Callable[[int], None] = lambda num_left: None) -> None:
        """Abort all requests, flush cached blocks to disk or sidecar, and end the threads.

        *progress* receives the number of blocks left to write.
        """
        if self._closed or os.getpid() != self._pid:
            return  # in a forked process the threads are missing, and the sockets are the parent's
        self._closed = True
        with ExitStack() as ends:  # close every part, even if another one raises
            ends.callback(self._accounts.close)  # after the tiers, which still report copies while they close
            if self._remote is not None:
                ends.callback(self._remote.close)
            ends.callback(self._close_tiers)
            ends.callback(self.images.close)
            ends.callback(self.runner.close)
            if self.publisher is not None:
                ends.callback(self.publisher.close)
            for request in [*self.scheduler.waiting, *self.scheduler.promoting, *self.scheduler.running]:
                self.abort(request)
            if self.runner.check_unchanged():
                self._flush(progress)
            else:
                log.warning("the model was changed while the engine was open; blocks not yet written are lost")
            self._publish_events()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine has been closed; create a new one")

    def _spill(self) -> None:
        """Copy cold blocks to lower tiers. If the model was changed, do nothing, because the blocks may be wrong."""
        if not self.runner.was_changed:
            self.cache.spill()

    def _flush(self, progress: Callable[[int], None]) -> None:
        self.catch_up()
        self.images.flush()
        if num_left := self.cache.drain.flush(FLUSH_TIMEOUT_S, progress):
            now = self._snapshot()
            log.warning(
                "flush: %d blocks did not reach the %s (%s); they will be recomputed",
                num_left,
                "disk" if now.sidecar is None else "sidecar",
                flush_fault(now.store, now.cache.disk, FLUSH_TIMEOUT_S, now.sidecar),
            )

    def _close_tiers(self) -> None:
        is_closed = False
        try:
            if self._store is not None:
                self._store.stop_opening()  # an I/O thread may be waiting for the store to open
            is_closed = self.cache.close()
            if not is_closed and self._store is not None:
                self._store.kill()  # a copy hangs, probably in the store's process
                is_closed = self.cache.close()
        except BaseException:
            if self._store is not None:
                self._store.kill()  # otherwise the next start would find its folder locked
            raise
        finally:
            if self._sidecar is not None:
                self._sidecar.close() if is_closed else self._sidecar.close_while_copying()
        if not is_closed:
            log.warning(
                "closing: a copy between tiers hangs, so its memory is not freed; "
                "blocks that were already written are found at the next start"
            )
        elif self._store is not None:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grammar_state(self, sampling: SamplingParams, grammar: Grammar | None) -> GrammarState | None:
        if sampling.structured_outputs is None:
            return None
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.runner.end_token_ids)}
        return (grammar or self.grammars.compile(sampling.structured_outputs)).begin(ends)

    def _check_tokens(self, token_ids: Sequence[int], sampling: SamplingParams) -> None:
        if not len(token_ids):
            raise ValueError("the prompt is empty; give at least one token")
        ids = np.asarray(token_ids)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"prompt: token ids have type {ids.dtype}; give a text or a flat list of integers")
        if not 0 <= ids.min() <= ids.max() < self.runner.vocab_size:
            worst = int(ids.min() if ids.min() < 0 else ids.max())
            raise ValueError(
                f"prompt: token id {worst} is not in the vocabulary; the model knows 0 to {self.runner.vocab_size - 1}"
            )
        limit, wanted = self.runner.max_tokens, len(ids) + sampling.max_tokens
        if limit is not None and wanted > limit:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and max_tokens is {sampling.max_tokens}; their sum exceeds the "
                f"model's limit of {limit}; shorten the prompt or lower max_tokens"
            )

    def _compute(self, work: Sequence[Work]) -> list[Request]:
        """Compute the step's work, and return the requests that got a token or ended without one."""
        depths = [item.request.num_computed for item in work]
        chunks = [self._chunk(item) for item in work]
        started_at = time.monotonic()  # after images were encoded, because prefill speed is measured without encoders
        is_scored = any(item.scored for item in work)
        logits = self.runner.run(chunks)
        lost = self.scheduler.settle(work)
        if is_scored:
            parts = torch.split_with_sizes(logits, [chunk.num_logits for chunk in chunks])
            logits = _score(work, parts, lost)
        self.scheduler.on_computed([item for item in work if item.request not in lost])

        # A request whose prompt is not yet computed gets no token.
        rows = [i for i, item in enumerate(work) if item.request not in lost and item.request.num_to_compute == 0]
        advanced = [work[i].request for i in rows]
        if drawn := [i for i in rows if work[i].request.sampling.max_tokens]:
            self._sample([work[i].request for i in drawn], logits if len(drawn) == len(work) else logits[drawn])
        for request in advanced:
            self._end_if_done(request)
        # Times of other steps would include waits for copies (a gate), or the logits of scored prompt tokens.
        if all(chunk.gate is None for chunk in chunks) and not is_scored:
            self._step_times.on_step(work, depths, time.monotonic() - started_at, bool(advanced))
        return advanced

    def _chunk(self, work: Work) -> Chunk:
        request, start = work.request, work.request.num_computed
        end, scored = start + work.num_tokens, work.scored
        return Chunk(
            request.token_ids[start:end],
            start,
            request.tables,
            work.gate,
            request.chain.extra.lora,
            end - scored.start if scored else 1,
            None if request.images is None else self.images.rows(request.images, start, end),
        )

    def _sample(self, requests: Sequence[Request], logits: torch.Tensor) -> None:
        """Append to each request its next token, drawn from *logits* `[requests, vocab]`."""
        token_ids = sample_tokens(logits, [request.sampler for request in requests])
        all_logprobs = step_logprobs(logits, token_ids, [request.sampling.logprobs for request in requests])
        for request, token_id, logprobs in zip(requests, token_ids, all_logprobs, strict=True):
            if logprobs is not None:
                request.logprobs.append(logprobs)
            request.append(token_id, self.runner.end_token_ids)
            self._accounts.on_token(request.timeline)

    def _end_if_done(self, request: Request) -> None:
        """Remove the request from the scheduler if it has finished. With `max_tokens` 0 it finishes without output."""
        if not request.sampling.max_tokens:
            request.finish(FinishReason.LENGTH)
        if request.finish_reason is not None:
            self.scheduler.retire(request)
            self._accounts.on_ended(request)

    def _publish_events(self) -> None:
        if self._events is not None and self.publisher is not None and (events := self._events.take()):
            self.publisher.publish(events)

    def _take_snapshot(self) -> None:
        self.statistics = self._snapshot()
        self._snapshot_at = time.monotonic()
        now = self.statistics
        self._fault_log.look(now.store, now.cache.disk, now.cache.tiers, now.sidecar, now.cache.remote)

    def _snapshot(self) -> EngineStatistics:
        scheduler, cache = self.scheduler, self.cache.statistics()
        return EngineStatistics(
            cache,
            scheduler.admitted_tokens,
            scheduler.hit_ratio.statistics(),
            0 if self.publisher is None else self.publisher.num_dropped,
            len(scheduler.waiting),
            len(scheduler.promoting),
            len(scheduler.running),
            self._bytes_of_tenants(cache),
            self._prepared_bytes(),
            self.planner.statistics(),
            None if self._store is None else self._store.standing(),
            None if self._sidecar is None else self._sidecar.standing(),
            self._accounts.statistics(cache.tiers),
            self.cache.pins.num_bytes,
            self.images.statistics(),
        )

    def _prepared_bytes(self) -> int:
        prepared = [memory.prepared_bytes for memory in self._memories]
        # With a sidecar, each attention group maps all of the sidecar's host memory.
        return sum(prepared) if self._sidecar is None else max(prepared)

    def _bytes_of_tenants(self, cache: CacheStatistics) -> dict[str, dict[Tier, int]]:
        on_disk = {} if cache.disk is None else cache.disk.tenants
        usage = {}
        for salt, tenant in self.config.tenants.items():
            key = tenant_of(salt)
            usage[tenant.name or key.hex()] = {
                Tier.HOST: cache.host_tenants.get(key, 0),
                Tier.DISK: on_disk.get(key, 0),
            }
        return usage


def _warmest_if_none(tiers: Sequence[Tier | None]) -> Iterator[Tier]:
    """Return the *tiers* of blocks. None, for a block that no attention group needs, becomes the device tier."""
    return (Tier.DEVICE if tier is None else tier for tier in tiers)


def with_images(extra: ExtraKeys, images: PromptImages) -> ExtraKeys:
    """Return *extra* with the identities of a prompt's images, which are part of the names of their blocks."""
    if extra.multimodal:
        raise ValueError("extra: it names multimodal items, and the prompt has images; give only one of them")
    return replace(extra, multimodal=images.items)


def _score(work: Sequence[Work], logits: Sequence[torch.Tensor], lost: Sequence[Request]) -> torch.Tensor:
    """Record the log probabilities of prompt tokens, given the *logits* `[tokens, vocab]` of each work item.

    Leave out *lost* requests, whose cached prefix could not be loaded.

    Returns:
        The last row of each item's logits, `[items, vocab]`.
    """
    for item, rows in zip(work, logits, strict=True):
        if item.request.scores is not None and item.scored and item.request not in lost:
            item.request.scores.add(rows[: len(item.scored)])
    return torch.stack([rows[-1] for rows in logits])
