"""An engine without a model: cache, scheduler and store are real, device and lanes take the time they are told."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kvtier.engine.config import SchedulerConfig
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.request import FinishReason, Request
from kvtier.engine.scheduling.scheduler import Scheduler, Work
from kvtier.engine.scheduling.timeline import Timeline
from kvtier.engine.text.detokenizer import Detokenizer
from kvtier.store.codec.seal import charged_bytes
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.cache import CacheOptions, TieredCache
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.local_tiers import lower_tiers
from kvtier.tiers.lower.name_set import NAMESPACE_BYTES
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.reuse.what_if import WhatIf
from kvtier.tiers.up.load_planner import LoadPlanner
from kvtier.tiers.up.prefill_speed import PrefillSpeed, tokens_read
from kvtier.transfer.block_memory import CpuMemory
from kvtier.transfer.lane import Finished, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

BLOCK_SIZE = 16  # tokens of the simulation; each stands for `TOKENS_EACH` of a model
TOKENS_EACH = 32
BLOCK_BYTES = 64
MODEL_BLOCK_BYTES = BLOCK_SIZE * TOKENS_EACH * 131_072  # of a model with Llama-3.1-8B's shape in bf16
ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)
IDLE_S = 0.01
# How a hit is loaded, and whether there is a disk.
WAYS = {"no disk": ("always", False), "always": ("always", True), "cost": ("cost", True), "split": ("split", True)}


class Arriving(NamedTuple):
    """A prompt and when it comes, in seconds."""

    at: float
    token_ids: Sequence[int]


@dataclass(frozen=True)
class Machine:
    """What things cost. Bytes and tokens are those of the model."""

    prefill_tokens_per_s: float = 15_000.0  # of the first tokens of a prompt
    attention_depth: float = 30_500.0  # tokens after which a token costs twice as much
    host_bytes_per_s: float = 50e9
    disk_bytes_per_s: float = 3e9
    device_blocks: int = 512
    host_blocks: int = 512
    disk_blocks: int = 100_000
    chunk: int = 2048


class SimulatedLane:
    """Takes its time and then does the work: one transfer after the other."""

    def __init__(self, finished: Finished, bytes_per_s: float) -> None:
        self._finished = finished
        self._bytes_per_s = bytes_per_s * BLOCK_BYTES / MODEL_BLOCK_BYTES
        self._queue: list[tuple[float, float, Transfer]] = []
        self.now = 0.0

    @property
    def num_pending(self) -> int:
        return len(self._queue)

    @property
    def next_at(self) -> float:
        """When the next transfer finishes."""
        return self._queue[0][0] if self._queue else float("inf")

    def submit(self, transfer: Transfer) -> bool:
        if len(self._queue) >= 64:
            return False
        start = self._queue[-1][0] if self._queue else self.now
        seconds = transfer.num_bytes / self._bytes_per_s
        self._queue.append((start + seconds, seconds, transfer))
        return True

    def advance(self, now: float) -> None:
        """Finish what is finished by *now*."""
        self.now = now
        while self._queue and self._queue[0][0] <= now:
            at, seconds, transfer = self._queue.pop(0)
            transfer.run()
            transfer.finished_at, transfer.seconds = at, seconds
            self._finished.put(transfer)

    def close(self) -> bool:
        return True


class SimulatedEngine:
    """Answers prompts with one token each, in simulated time."""

    def __init__(self, machine: Machine, load: str, with_disk: bool = True) -> None:
        """*load*: as in `[scheduler]`."""
        self.now = 0.0
        self._machine = machine
        finished: Finished = Finished()
        speeds = {
            Route.DEVICE_TO_HOST: machine.host_bytes_per_s,
            Route.HOST_TO_DEVICE: machine.host_bytes_per_s,
            Route.HOST_TO_DISK: machine.disk_bytes_per_s,
            Route.DISK_TO_HOST: machine.disk_bytes_per_s,
        }
        self._lanes = {route: SimulatedLane(finished, speed) for route, speed in speeds.items()}
        self._device = np.zeros((machine.device_blocks, BLOCK_BYTES), np.uint8)
        memory = CpuMemory(self._device, machine.host_blocks)
        store = MemoryStore(machine.disk_blocks * charged_bytes(BLOCK_BYTES))
        disk = DiskTier(store, bytes(NAMESPACE_BYTES), self._clock) if with_disk else None
        self.planner = LoadPlanner(
            PrefillSpeed(), machine.chunk // TOKENS_EACH, self._clock, with_splits=load == "split"
        )
        groups, transfers = [FullAttention(BLOCK_SIZE)], TransferEngine(self._lanes, finished)
        self.cache = TieredCache(
            groups,
            [memory],
            transfers,
            lower_tiers(groups, [memory], transfers, disk, self._clock),
            self._clock,
            CacheOptions(partial_blocks=False),
            planner=None if load == "always" else self.planner,
        )
        config = SchedulerConfig(
            token_budget=4 * machine.chunk // TOKENS_EACH, prefill_chunk=machine.chunk // TOKENS_EACH, max_running=64
        )
        self._scheduler = Scheduler(self.cache, config, math.inf, self.planner, self._clock)
        self.what_if = WhatIf(self._clock, math.inf)
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")))

    def answer(self, prompts: Sequence[Arriving]) -> list[float]:
        """Seconds from each prompt's arrival to its first token."""
        waiting = sorted(prompts, key=lambda prompt: prompt.at)
        requests: list[Request] = []
        done_at: dict[Request, float] = {}
        while len(done_at) < len(prompts):
            while len(requests) < len(waiting) and waiting[len(requests)].at <= self.now:
                requests.append(self.ask(waiting[len(requests)]))
            work = self._scheduler.schedule()
            if work:
                self._advance(self.now + self._seconds(work))
                done_at |= dict.fromkeys(self._computed(work), self.now)
            else:
                arrival = waiting[len(requests)].at if len(requests) < len(waiting) else float("inf")
                soon = self.now + IDLE_S if self._scheduler.has_work else float("inf")
                self._advance(min(arrival, soon, *(lane.next_at for lane in self._lanes.values())))
            self.cache.spill()
        return [done_at[request] - request.timeline.arrived_at for request in requests]

    @property
    def tokens(self) -> TokenBalance:
        """Where all prompts' tokens came from."""
        return self._scheduler.admitted_tokens

    def _clock(self) -> float:
        return self.now

    def ask(self, prompt: Arriving) -> Request:
        """Queue a prompt."""
        chain = BlockChain(BLOCK_SIZE)
        chain.extend(prompt.token_ids)
        request = Request(
            prompt.token_ids, ONE_TOKEN, chain, Detokenizer(self._tokenizer, []), timeline=Timeline(prompt.at)
        )
        self._scheduler.add(request)
        return request

    def _seconds(self, work: Sequence[Work]) -> float:
        machine, seconds = self._machine, 0.0
        for item in work:
            num_tokens = item.num_tokens * TOKENS_EACH
            read = tokens_read(item.request.num_computed * TOKENS_EACH, num_tokens)
            seconds += (num_tokens + read / machine.attention_depth) / machine.prefill_tokens_per_s
        return seconds

    def _computed(self, work: Sequence[Work]) -> list[Request]:
        num_tokens = sum(item.num_tokens for item in work)
        num_read = sum(tokens_read(item.request.num_computed, item.num_tokens) for item in work)
        self.planner.prefill.on_computed(num_tokens, num_read, self._seconds(work))
        self._scheduler.on_computed(work)
        done = [item.request for item in work if item.request.num_to_compute == 0]
        for request in done:
            request.finish(FinishReason.LENGTH)
            self._scheduler.retire(request)
            num_asked = len(request.prompt_token_ids) // BLOCK_SIZE
            self.what_if.on_prompt(request.chain.names[:num_asked], BLOCK_SIZE, BLOCK_BYTES, request.balance())
        return done

    def _advance(self, now: float) -> None:
        self.now = max(self.now, now)
        for lane in self._lanes.values():
            lane.advance(self.now)


def documents(num_prompts: int, num_documents: int = 40, num_blocks: int = 32, per_s: float = 1.0) -> list[Arriving]:
    """Questions about documents of 16k tokens, some asked about more than others."""
    rng = random.Random(1)
    at, prompts = 0.0, []
    for number in range(num_prompts):
        at += rng.expovariate(per_s)
        document = int(num_documents * rng.random() ** 1.5)
        text = [1000 * document + block for block in range(num_blocks) for _ in range(BLOCK_SIZE)]
        prompts.append(Arriving(at, text + [10**6 + number] * (BLOCK_SIZE // 2)))
    return prompts
