"""Construction of an engine: the one place that creates and connects its parts."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvtier.engine.attached.attachment import Attachment
from kvtier.engine.attached.sidecar_tiers import SidecarTiers
from kvtier.engine.attached.wire import VERSION, GroupShape, Hello, Traced, packed
from kvtier.engine.config import Config
from kvtier.engine.core import EngineCore, Parts
from kvtier.engine.images.engine_images import Images
from kvtier.engine.images.open_images import open_images
from kvtier.engine.images.row_store import RowStore
from kvtier.engine.images.row_tier import RowTier
from kvtier.engine.images.sidecar_rows import SidecarRows
from kvtier.engine.kv_events import ZmqPublisher
from kvtier.engine.machine_limits import refuse_more_than_disk, refuse_more_than_memory
from kvtier.engine.model.gpu_share import device_capacity
from kvtier.engine.model.lora_adapter import load_adapters
from kvtier.engine.model.poisoned_cache import PoisonedCache
from kvtier.engine.model.runner import ModelRunner
from kvtier.engine.model.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from kvtier.engine.observability.explain.explainer import Explainer, namespace_fields
from kvtier.engine.observability.explain.local_explainer import LocalExplainer
from kvtier.engine.observability.records.request_accounts import RequestAccounts
from kvtier.engine.observability.records.request_log import RequestLog, open_request_log
from kvtier.engine.observability.tracing.request_traces import RequestTraces
from kvtier.engine.scheduling.look_ahead import LookAhead
from kvtier.engine.scheduling.scheduler import Scheduler
from kvtier.engine.scheduling.step_times import StepTimes
from kvtier.engine.scheduling.timed_pins import TimedPins
from kvtier.engine.scheduling.trail import Trails
from kvtier.engine.stores.disk_division import division_text
from kvtier.engine.stores.disk_store import disk_tier, open_store, refuse_lossy, with_rounding_of
from kvtier.engine.stores.remote_store import OpenRemote, open_remote
from kvtier.engine.stores.reopening_store import ReopeningStore
from kvtier.store.process.store_process import SWITCH_INTERVAL_S
from kvtier.tiers.cache import CacheOptions, TieredCache
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.local_tiers import LocalTiers, lower_tiers
from kvtier.tiers.lower.lower_tiers import LowerTiers
from kvtier.tiers.lower.remote.remote_tier import RemoteTier
from kvtier.tiers.lower.spill_log import SpillLog
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.events import EventLog
from kvtier.tiers.naming.named_blocks import tenant_of
from kvtier.tiers.naming.namespace import Namespace
from kvtier.tiers.reuse.what_if import WhatIf
from kvtier.tiers.up.load_planner import LoadPlanner
from kvtier.tiers.up.prefill_speed import PrefillSpeed
from kvtier.transfer.attached_memory import AttachedMemory
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.lane import Finished, Lane, ThreadLane
from kvtier.transfer.transfer_engine import Route, TransferEngine

if TYPE_CHECKING:
    from transformers import BaseImageProcessor

# Wait this long for host memory to be prepared, which suffices for 1 to 2 GB. While memory was still being prepared, a
# first load was up to three times slower.
STARTUP_WAIT_S = 1.0
# Wait this long for the store: on a busy machine its process takes seconds to start. A store that takes longer is used
# as soon as it is open.
OPENING_WAIT_S = 30.0
INDEX_WAIT_S = 5.0  # reading the index of a million blocks on disk takes about 3 s
INDEX_LOOK_S = 0.05  # pause between two checks of whether the index has been read
SIDECAR_POLL_S = 0.002  # pause between two polls of a sidecar, which reports a few hundred blocks at a time
ATTACH_WAIT_S = 10.0  # a running sidecar answers at once, and its memory is mapped in much less time
MAX_NAME_CHARACTERS = 256
LOAD_TIMEOUT_S = 10.0  # time limit for the load of a hit, in an engine without a disk
MAX_SCORED_LOGITS = 1 << 25  # per step: 128 MiB in float32; the logits of a whole long prompt take gigabytes
NUM_READERS = 4  # concurrent reads from disk
NUM_WRITERS = 3  # concurrent writes to disk: the third one gathers its blocks while the others write


def build_core(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    progress: Callable[[str], None] = lambda stage: None,
    image_processor: "BaseImageProcessor | None" = None,
) -> EngineCore:
    """Build the engine that the configuration describes. *progress* is called with the name of each stage.

    Prompts may have images if the model sees images and *image_processor* is the model's.

    If the store on disk cannot be opened, a warning is logged, and the engine works without it until it can be opened.

    Raises:
        UnsupportedModel: If the model's attention cannot use paged KV.
        ValueError: If a configured size, codec or default sampling parameter of the model is unusable, or if the
            sidecar refuses the engine.
        UnusableLora: If an adapter belongs to another model.
        MissingExtra: If KV events are configured and pyzmq is not installed.
        OSError: If an endpoint for KV events cannot be used.
    """
    sampling_defaults = NO_DEFAULTS if config.model.generation_config == "none" else SamplingDefaults.of(model)
    with ExitStack() as undo:
        runner = _runner(model, config, undo, progress)
        events = None if config.events is None else EventLog()
        publisher = None if config.events is None else ZmqPublisher(config.events, runner.groups)
        if publisher is not None:
            undo.callback(publisher.close)
        progress("preparing host memory")
        shared = [] if config.sidecar is None else runner.attached_memories()
        memories: Sequence[BlockMemory] = shared or runner.memories(_host_bytes(config))
        for memory in memories:
            undo.callback(memory.close)
        progress("computing the digest of the weights")
        namespace = with_rounding_of(runner.namespace(config.names.algorithm, config.names.resolved_seed), config.disk)
        store, disk = _open_disk(config, namespace, memories, undo, progress)  # threads prepare the memory meanwhile
        traces = RequestTraces.of(config.tracing, "kvtier")
        if traces is not None:
            undo.callback(traces.close)
        finished: Finished = Finished()
        remote = _open_remote(config, finished, namespace, undo)
        transfers = _transfers(runner, memories[0].num_copiers, finished, remote)
        undo.callback(transfers.close)
        sidecar = None
        if config.sidecar_path is not None:
            progress(f"attaching to the sidecar at {config.sidecar_path}")
            answers = ThreadLane(finished, "answers")
            sidecar = _attach(config.sidecar_path, runner, namespace, shared, transfers, answers, events, traces)
            undo.callback(sidecar.close)
        spills = None if traces is None else traces.spills
        lower = sidecar or _own_tiers(
            config,
            runner,
            memories,
            transfers,
            disk,
            None if remote is None else remote.tier_of(namespace),
            events,
            spills,
        )
        if config.device.poison:
            memories = runner.poisoned(memories)
        planner = _planner(config, runner)
        cache = _cache(config, runner, memories, transfers, lower, events, planner, spills)
        progress("waiting for host memory and the disk's index")
        _wait_prepared(memories, store, sidecar, cache)
        load_timeout_s = LOAD_TIMEOUT_S if config.disk is None else config.disk.read_timeout_s
        pins = TimedPins(cache, time.monotonic)
        look_ahead = _look_ahead(config, cache, pins)
        trails = Trails()
        scheduler = Scheduler(
            cache,
            config.scheduler,
            load_timeout_s,
            planner,
            look_ahead=look_ahead,
            trails=trails,
            max_scored=max(1, MAX_SCORED_LOGITS // runner.vocab_size),
        )
        request_log = open_request_log(config.request_log)
        if request_log is not None:
            undo.callback(request_log.close)
        step_times = StepTimes(planner.prefill, config.device.block_size)
        images = _images(config, runner, tokenizer, image_processor, store, lower, namespace)
        undo.callback(images.close)
        core = EngineCore(
            tokenizer,
            config,
            Parts(
                runner,
                memories,
                cache,
                pins,
                planner,
                scheduler,
                namespace.digest,
                step_times,
                _accounts(config, runner, trails, request_log, traces, _explainer(config, runner, namespace, cache)),
                load_timeout_s,
                events,
                publisher,
                store,
                sidecar,
                remote,
                sampling_defaults,
                images,
            ),
        )
        undo.pop_all()
    return core


def _runner(model: PreTrainedModel, config: Config, undo: ExitStack, progress: Callable[[str], None]) -> ModelRunner:
    """Load the adapters, check the model and allocate the device's memory. Raises the errors of `build_core`."""
    progress("checking the model's attention layers")
    adapters = load_adapters(model, config.lora, progress)
    capacity = partial(device_capacity, config, model)
    runner = ModelRunner(model, config.device.block_size, capacity, adapters, config.device.retention_tokens)
    undo.callback(runner.close)
    if runner.layout.states.tensors:
        refuse_lossy(config.disk, "disk")
        refuse_lossy(config.remote, "remote")
    return runner


def _host_bytes(config: Config) -> int:
    """Return the size of the host tier. Raise ValueError if it is more than the memory of the machine."""
    if config.host is None:
        return 0
    refuse_more_than_memory("host.capacity", config.host.capacity)
    return config.host.capacity


def _explainer(config: Config, runner: ModelRunner, namespace: Namespace, cache: TieredCache) -> LocalExplainer:
    """Create the explainer of cache misses. It keeps the prompts seen so far in a file next to the store on disk."""
    store = None if config.disk is None else Path(config.disk.path)
    explainer = Explainer(
        config.device.block_size,
        {**namespace_fields(namespace), "block_size": str(config.device.block_size)},
        time.monotonic,
        path=None if store is None else store.with_name(f"{store.name}-seen"),
        block_steps=[group.block_size // config.device.block_size for group in runner.groups],
    )
    return LocalExplainer(explainer, cache.residency.ghosts)


def _accounts(
    config: Config,
    runner: ModelRunner,
    trails: Trails,
    request_log: RequestLog | None,
    traces: RequestTraces | None,
    explainer: LocalExplainer,
) -> RequestAccounts:
    block_size = config.device.block_size
    return RequestAccounts(
        WhatIf(time.monotonic, state_bytes=runner.layout.states.slot_bytes),
        trails,
        request_log,
        traces,
        explainer,
        block_tokens=block_size,
        block_bytes=runner.layout.mean_block_bytes,
        top_tenants=config.metrics.top_tenants,
    )


def _open_disk(
    config: Config,
    namespace: Namespace,
    memories: Sequence[BlockMemory],
    undo: ExitStack,
    progress: Callable[[str], None],
) -> tuple[ReopeningStore | None, DiskTier | None]:
    if config.disk is None:
        return None, None
    refuse_more_than_disk(config.disk)
    progress(f"opening the store {config.disk.path}: {division_text(config.disk.capacity)}")
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
    store = open_store(config.disk, namespace.dtype, memories, config.tenants)
    undo.callback(store.close)
    store.wait_opened(OPENING_WAIT_S)
    return store, disk_tier(store, config.disk, namespace)


def _images(
    config: Config,
    runner: ModelRunner,
    tokenizer: PreTrainedTokenizerBase,
    processor: "BaseImageProcessor | None",
    store: ReopeningStore | None,
    lower: LowerTiers,
    namespace: Namespace,
) -> Images:
    def open_rows(row_bytes: int) -> RowTier | None:
        if config.sidecar_path is not None:
            model = f"{_name_of(runner.model)} (images)"[-MAX_NAME_CHARACTERS:]
            rows = SidecarRows(config.sidecar_path, _program(), model, namespace.digest, row_bytes)
            if isinstance(lower, SidecarTiers) and lower.is_attached:
                rows.wait_told(INDEX_WAIT_S)
            return rows
        is_exact = namespace.kv_quantization == "none"  # a lossy codec would round the rows
        if store is None or not is_exact or not isinstance(lower, LocalTiers):
            return None
        return RowStore(store, lower.other_records, namespace.digest)

    return open_images(runner, tokenizer, processor, config.images, open_rows)


def _open_remote(config: Config, finished: Finished, namespace: Namespace, undo: ExitStack) -> OpenRemote | None:
    if config.remote is None:
        return None
    remote = open_remote(config.remote, finished, namespace.dtype)
    undo.callback(remote.close)
    return remote


def _attach(
    path: str,
    runner: ModelRunner,
    namespace: Namespace,
    memories: Sequence[AttachedMemory],
    transfers: TransferEngine,
    answers: Lane,
    events: EventLog | None,
    traces: RequestTraces | None,
) -> SidecarTiers:
    """Return the tiers of the sidecar at *path*, which may start later. Raise ValueError if it refuses the engine."""
    shapes = [
        GroupShape(group.block_size, group.forgets, memory.block_bytes, group.keeps_states)
        for group, memory in zip(runner.groups, memories, strict=True)
    ]
    hello = Hello(VERSION, _program(), _name_of(runner.model), namespace.digest, shapes)
    attachment = Attachment(path, hello, memories)
    attachment.wait_tried(ATTACH_WAIT_S)
    if why := attachment.why_refused:
        attachment.close()
        answers.close()
        raise ValueError(f"sidecar {path}: {why}")

    def find_traced(names: Sequence[BlockName]) -> list[Traced]:
        found = {} if traces is None else traces.find(names)
        return [Traced(span.header, packed(places)) for span, places in found.items()]

    return SidecarTiers(attachment, runner.groups, memories, transfers, answers, events=events, find_traced=find_traced)


def _program() -> str:
    """Return the program's name and version for the sidecar's list of attached engines."""
    return f"kvtier {version('kvtier')}"


def _name_of(model: PreTrainedModel) -> str:
    """Return the model's name for the sidecar's list of attached engines."""
    name = Path(model.config.name_or_path or "").name or type(model).__name__
    return "".join(filter(str.isprintable, name))[:MAX_NAME_CHARACTERS]


def _transfers(runner: ModelRunner, num_copiers: int, finished: Finished, remote: OpenRemote | None) -> TransferEngine:
    """Create the lanes that copy blocks: CUDA streams to and from a GPU, threads for all other copies."""
    lanes: dict[Route, Lane] = {
        Route.HOST_TO_DISK: ThreadLane(finished, "store", num_threads=NUM_WRITERS),
        Route.DISK_TO_HOST: ThreadLane(finished, "load", num_threads=NUM_READERS),
    }
    if remote is not None:
        lanes |= remote.lanes()
    for route in (Route.DEVICE_TO_HOST, Route.HOST_TO_DEVICE):
        if runner.device.type == "cuda":
            from kvtier.transfer.cuda.lane import CudaLane

            lanes[route] = CudaLane(finished, route, runner.device, num_threads=num_copiers)
        else:
            lanes[route] = ThreadLane(finished, route)
    return TransferEngine(lanes, finished)


def _planner(config: Config, runner: ModelRunner) -> LoadPlanner:
    any_forgets = any(group.forgets for group in runner.groups)
    with_splits = config.scheduler.load == "split" and not any_forgets
    return LoadPlanner(PrefillSpeed(), config.scheduler.prefill_chunk, time.monotonic, with_splits=with_splits)


def _cache(
    config: Config,
    runner: ModelRunner,
    memories: Sequence[BlockMemory],
    transfers: TransferEngine,
    lower: LowerTiers,
    events: EventLog | None,
    planner: LoadPlanner,
    spills: SpillLog | None,
) -> TieredCache:
    state_interval = runner.layout.state_interval
    return (PoisonedCache if config.device.poison else TieredCache)(
        runner.groups,
        memories,
        transfers,
        lower,
        options=CacheOptions(
            retention_tokens=config.device.retention_tokens if state_interval is None else state_interval,
            partial_blocks=config.device.partial_blocks,
            by_layers=config.scheduler.by_layers and state_interval is None,  # a state is needed as a whole
            # A copy that starts after one step is known to be complete only after the next step. Until then both steps
            # take the slots of clean blocks, which are blocks with a copy in a lower tier.
            min_clean_ahead=2 * -(-config.scheduler.token_budget // config.device.block_size),
            copies_all_down=config.sidecar is not None or config.remote is not None,
        ),
        events=events,
        planner=None if config.scheduler.load == "always" else planner,
        spills=spills,
    )


def _own_tiers(
    config: Config,
    runner: ModelRunner,
    memories: Sequence[BlockMemory],
    transfers: TransferEngine,
    disk: DiskTier | None,
    remote: RemoteTier | None,
    events: EventLog | None,
    spills: SpillLog | None,
) -> LowerTiers:
    quotas = {tenant_of(salt): tenant.host for salt, tenant in config.tenants.items() if tenant.host is not None}
    return lower_tiers(
        runner.groups, memories, transfers, disk, remote=remote, quotas=quotas, events=events, spills=spills
    )


def _wait_prepared(
    memories: Sequence[BlockMemory], store: ReopeningStore | None, sidecar: SidecarTiers | None, cache: TieredCache
) -> None:
    """Wait for host memory and the disk's index, up to a few seconds, so that the first requests are fast."""
    cache.poll()  # to obtain the host slots of a sidecar
    for memory in memories:
        memory.wait_prepared(STARTUP_WAIT_S / len(memories))
    give_up_at = time.monotonic() + INDEX_WAIT_S
    while store is not None and store.opening() and time.monotonic() < give_up_at:
        if cache.lower.status.is_indexed:
            return
        cache.wait(INDEX_LOOK_S)
    while (
        sidecar is not None
        and sidecar.is_attached
        and not cache.lower.status.is_indexed
        and time.monotonic() < give_up_at
    ):
        cache.poll()
        time.sleep(SIDECAR_POLL_S)


def _look_ahead(config: Config, cache: TieredCache, pins: TimedPins) -> LookAhead | None:
    settings = config.scheduler
    if not settings.look_ahead or not (config.disk or config.remote or config.sidecar):
        return None
    share = settings.look_ahead
    return LookAhead(cache, pins, lambda: int(share * cache.lower.status.host_bytes), settings.look_ahead_s)
