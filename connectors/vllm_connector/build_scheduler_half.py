"""Construction of the scheduler's half of the connector from vLLM's configuration."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from kvtier.connectors.vllm_connector.adapters import Adapters
from kvtier.connectors.vllm_connector.digests import NUM_THREADS, Digests
from kvtier.connectors.vllm_connector.engine_facts import engine_facts
from kvtier.connectors.vllm_connector.engine_layout import GroupLayout, UnsupportedEngine, namespace_of
from kvtier.connectors.vllm_connector.scheduler_half import Heard, SchedulerHalf
from kvtier.connectors.vllm_connector.scheduler_side import SchedulerSide
from kvtier.connectors.vllm_connector.step_work import Segment
from kvtier.engine.attached.attachment import Attachment
from kvtier.engine.attached.sidecar_tiers import SidecarTiers
from kvtier.engine.attached.wire import VERSION, GroupShape, Hello
from kvtier.transfer.attached_memory import AttachedMemory
from kvtier.transfer.block_memory import BlockMemory, CpuMemory
from kvtier.transfer.lane import ThreadLane
from kvtier.transfer.transfer_engine import TransferEngine

SOCKET_SCHEME = "unix://"
log = logging.getLogger(__name__)

ATTACH_WAIT_S = 10.0  # max wait at the start; a running sidecar answers at once
# Max wait at the start for the sidecar to announce its blocks, which takes about 8 s for a million blocks. Further
# blocks are announced during the first requests.
TOLD_WAIT_S = 10.0
MAX_NAME_CHARACTERS = 256
NUM_KEPT_STATES = 4  # slots that stay reserved for recurrent states, per group


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings that `kv_connector_extra_config` may have.

    *sidecar* is the path of the sidecar's Unix socket. *deadline_ms* limits how long a request waits until its prefix
    is in host memory. *weights* is a name for the model's weights. If it is None, the weights' digest is computed.
    """

    sidecar: Annotated[str, msgspec.Meta(min_length=1)]
    deadline_ms: Annotated[float, msgspec.Meta(gt=0, le=60_000)] = 300.0
    weights: Annotated[str, msgspec.Meta(min_length=1)] | None = None


def settings_of(extra_config: Mapping[str, object]) -> Settings:
    """Parse the settings. Raise ValueError, whose message names the setting, if one is unknown or out of range."""
    try:
        settings = msgspec.convert(extra_config, Settings)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_connector_extra_config: {error}") from None
    return msgspec.structs.replace(settings, sidecar=settings.sidecar.removeprefix(SOCKET_SCHEME))


def build_scheduler_half(
    vllm_config: Any, kv_cache_config: Any, layouts: Sequence[GroupLayout], settings: Settings
) -> SchedulerHalf:
    """Create the scheduler's half of the connector and attach it to the sidecar.

    If no sidecar is running yet, the half attaches as soon as there is one.

    Raises:
        UnsupportedEngine: If the sidecar refuses this engine, or if the weights' digest cannot be computed.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    weights_key = '"weights" in kv_connector_extra_config'
    facts = engine_facts(vllm_config, kv_cache_config, settings.weights, weights_key)
    hello = Hello(
        VERSION,
        f"vLLM {facts['vllm']}, kvtier {_version('kvtier')}",
        _printable(Path(str(vllm_config.model_config.model)).name),
        namespace_of(facts, layouts, specs),
        [
            GroupShape(each.attention.block_size, each.attention.forgets, each.block_bytes, each.attention.keeps_states)
            for each in layouts
        ],
    )
    memories = [host_slots(layout.block_bytes) for layout in layouts]
    attachment = Attachment(settings.sidecar, hello, memories)
    attachment.wait_tried(ATTACH_WAIT_S)
    if why := attachment.why_refused:
        attachment.close()
        raise UnsupportedEngine(f"cannot attach to the sidecar at {settings.sidecar}: {why}")

    half = SchedulerHalf()
    heard = Heard(half.on_answers)
    threads = ThreadPoolExecutor(NUM_THREADS, "kvtier-digests")
    transfers = TransferEngine({}, heard)
    groups = [layout.attention for layout in layouts]
    answers = ThreadLane(heard, "answers")
    num_tokens = vllm_config.scheduler_config.max_num_batched_tokens  # of one step
    # Keep slots reserved for the blocks of two steps, because the next step follows soon. One step may use all of them,
    # for example after a sidecar has attached late. Recurrent states are large and rare: a prompt has one at its end.
    max_stored = [2 * -(-num_tokens // group.block_size) for group in groups]
    num_kept = [
        limit if group.resumes_inside else min(limit, NUM_KEPT_STATES)
        for limit, group in zip(max_stored, groups, strict=True)
    ]
    tiers = SidecarTiers(attachment, groups, memories, transfers, answers, num_kept=num_kept)
    side = SchedulerSide(
        tiers,
        lambda boot: Segment(boot, settings.sidecar, hello),
        groups,
        memories,
        Digests(threads, half.on_digests),
        Adapters(threads),
        hash_tokens=kv_cache_config.hash_block_size or groups[0].block_size,
        num_workers=vllm_config.parallel_config.tensor_parallel_size,
        max_stored=max_stored,
        deadline_s=settings.deadline_ms / 1e3,
        depend_on_next=[group_id for group_id, layout in enumerate(layouts) if layout.depends_on_next],
    )

    def end_threads() -> None:
        threads.shutdown(wait=False, cancel_futures=True)
        answers.close()

    half.attach(side, tiers, transfers, end_threads)
    if not half.wait_told(TOLD_WAIT_S) and tiers.is_attached:
        log.warning("kvtier: the sidecar has not announced all of its blocks yet; the first lookups may miss some")
    return half


def host_slots(block_bytes: int) -> AttachedMemory:
    """Return a group's slots in the sidecar's memory, for the scheduler's process, which has no KV cache.

    The scheduler's process computes digests of the slots. Workers copy between the slots and the KV cache.
    """

    def make(num_host_slots: int, file: int | None) -> BlockMemory:
        return CpuMemory(np.empty((0, block_bytes), np.uint8), num_host_slots, file=file)

    return AttachedMemory(make)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source folder
        return "from source"


def _printable(name: str) -> str:
    """Return *name* in a form that the sidecar can display: printable, with at most `MAX_NAME_CHARACTERS`."""
    return "".join(filter(str.isprintable, name))[:MAX_NAME_CHARACTERS]
