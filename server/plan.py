"""ServerPlan: the report of `--check-config`, made without loading the model's weights."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvtier.engine.config import Config, size_text
from kvtier.engine.llm import torch_device
from kvtier.engine.model.adapter_folder import UnusableLora
from kvtier.engine.model.checkpoint import Checkpoint, auto_class
from kvtier.engine.model.gpu_share import GpuShare
from kvtier.engine.model.lora_adapter import load_adapter
from kvtier.engine.model.paged_layout import MIN_DEVICE_SLOTS, PagedLayout, layout_of
from kvtier.engine.observability.records.request_log import refuse_unusable
from kvtier.engine.scheduling.slot_demand import longest_request
from kvtier.engine.stores.disk_division import division_text
from kvtier.engine.stores.disk_store import MIN_BLOCKS, refuse_lossy
from kvtier.engine.text.template_traits import TemplateTraits
from kvtier.extras import MissingExtra
from kvtier.server.documents.documents import documents_path, persistence_advice
from kvtier.server.settings_without_effect import settings_without_effect
from kvtier.store.lmdb.data_file import capacity_within, max_bytes
from kvtier.tiers.naming.retention import QUESTION_TOKENS, Retention
from kvtier.web.api_keys import ApiKeys

MIN_SLOTS = {"device": MIN_DEVICE_SLOTS, "host": 1, "disk": MIN_BLOCKS}  # of each attention group


@dataclass(frozen=True, slots=True)
class TierSize:
    """The capacity of one tier in bytes, blocks, tokens and recurrent states."""

    name: str  # device, host or disk
    capacity_bytes: int
    num_blocks: int
    num_tokens: int
    num_states: int = 0  # recurrent states, for a model that has them
    origin: str = ""  # where the tier is, or how its size was derived if the size is not configured


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The sizes and the problems of a configuration. If there are *refusals*, the server would not start."""

    model: str
    architecture: str
    dtype: str
    model_tokens: int | None  # maximum sequence length of the model; None: no limit
    block_size: int
    block_bytes: int
    state_bytes: int  # of the recurrent states after one token; 0 for a model without them
    state_interval: int | None  # tokens between the states that are kept of a prompt
    tiers: list[TierSize]
    longest_request: int
    remote: str | None  # the address of a remote tier, without a password
    sidecar: str | None  # address of the sidecar with the lower tiers; None: the engine has its own lower tiers
    documents: Path | None  # the folder of documents; None: documents are lost when the process ends
    remarks: list[str]  # one line for each part of the configuration that does not fit or does not work
    settings_without_effect: list[str]
    refusals: list[str]

    def lines(self) -> Iterator[str]:
        """Yield the lines of text that `--check-config` prints."""
        limit = "any number of" if self.model_tokens is None else f"{self.model_tokens:,}"
        yield f"model      {self.model}: {self.architecture}, {self.dtype}, takes {limit} tokens"
        per_token = self.block_bytes / self.block_size
        yield f"KV         {per_token:,.0f} bytes per token, {self.block_bytes:,} per block of {self.block_size} tokens"
        if self.state_bytes:
            kept = _kept_states(self.state_interval)
            yield f"states     {self.state_bytes:,} bytes each; {kept}"
        for tier in self.tiers:
            size = size_text(tier.capacity_bytes)
            states = f" {tier.num_states:>8,} states" if self.state_bytes else ""
            origin = f", {tier.origin}" if tier.origin else ""
            blocks = f"{tier.num_blocks:>10,} blocks {tier.num_tokens:>12,} tokens"
            yield f"{tier.name:<11}{size:>10}  {blocks}{states}{origin}"
        if self.remote is not None:
            yield f"remote     {self.remote}, shared with other machines"
        if self.sidecar is not None:
            yield f"sidecar    {self.sidecar} has the tiers below the device"
        yield f"longest    {self.longest_request:,} tokens, a prompt and its continuation together"
        kept = f"end with the process; {persistence_advice(self.sidecar)}"
        yield f"documents  {kept if self.documents is None else f'are kept in {self.documents}'}"
        for title, lines in (
            ("does not fit, or does not work", self.remarks),
            ("has no effect", self.settings_without_effect),
            ("refused", self.refusals),
        ):
            if lines:
                yield ""
                yield f"{title}:"
                yield from (f"  {line}" for line in lines)


def make_plan(model: str, config: Config, keys: ApiKeys | None) -> ServerPlan:
    """Return the plan of a server for *model* with *config* and the API *keys*.

    Raises ValueError if the model has no readable configuration, and `UnsupportedModel` if kvtier cannot serve it.
    """
    checkpoint = Checkpoint.of(model)
    described = checkpoint.config()
    dtype = _dtype(described, config.model.dtype)
    block_size = config.device.block_size
    skeleton = _without_weights(described)
    layout = layout_of(skeleton, block_size, dtype, config.device.retention_tokens)
    groups, block_bytes = layout.groups, layout.token_block_bytes
    tiers = list(_tier_sizes(config, _share(config, skeleton, layout), layout))
    model_tokens: int | None = getattr(described.get_text_config(), "max_position_embeddings", None)
    slots = layout.num_slots(tiers[0].capacity_bytes)
    longest = longest_request(groups, slots, config.scheduler.prefill_chunk, model_tokens)
    return ServerPlan(
        model,
        (described.architectures or [type(described).__name__])[0],
        str(dtype).removeprefix("torch."),
        model_tokens,
        block_size,
        block_bytes,
        layout.states.slot_bytes,
        layout.state_interval,
        tiers,
        longest,
        None if config.remote is None else config.remote.where,
        config.sidecar,
        documents_path(config),
        list(_remarks(checkpoint, config, model_tokens, longest, layout)),
        settings_without_effect(config, groups, keys),
        [
            *_refusals(tiers, layout),
            *_refused_codecs(config, layout),
            *_refused_retention(config, layout),
            *_refused_folders(config),
            *_refused_log(config),
            *_refused_adapters(config, skeleton),
        ],
    )


def _dtype(described: PreTrainedConfig, wanted: str) -> torch.dtype:
    if wanted != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[wanted]
    found = described.get_text_config().dtype or described.dtype
    return found if isinstance(found, torch.dtype) else torch.float32


def _without_weights(described: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):  # bfloat16, because some models accept nothing else; shapes do not depend on it
        model: PreTrainedModel = auto_class(described).from_config(described, dtype=torch.bfloat16)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _share(config: Config, skeleton: PreTrainedModel, layout: PagedLayout) -> GpuShare | None:
    """Return the share of GPU memory for the block pool, or None if the configuration gives the pool's size in bytes.

    Raises ValueError if the configuration asks for a share, but there is no GPU.
    """
    if config.device.gpu_memory_utilization is None:
        return None
    return GpuShare.of(config, skeleton, layout, torch_device(config.model.device))


def _kept_states(interval: int | None) -> str:
    every = f"every {interval:,} tokens, " if interval else ""
    ends = f"at ends of prompts and answers, {QUESTION_TOKENS} tokens before ends of prompts"
    return f"kept {every}{ends}, and where prompts diverge"


def _tier_sizes(config: Config, share: GpuShare | None, layout: PagedLayout) -> Iterator[TierSize]:
    device = (int(config.device.capacity), "") if share is None else (share.pool_bytes, str(share))
    sizes = {"device": device}
    if config.host is not None:
        sizes["host"] = (int(config.host.capacity), "")
    if config.disk is not None:
        asked = f"of {size_text(config.disk.capacity)}: {division_text(config.disk.capacity)}"
        sizes["disk"] = (capacity_within(config.disk.capacity), f"in {config.disk.path}, {asked}")
    for tier, (capacity_bytes, origin) in sizes.items():
        slots = layout.num_slots(capacity_bytes, minimum=MIN_SLOTS[tier])
        num_blocks = slots[0] if layout.num_attention_groups else 0
        num_states = slots[-1] if layout.states.tensors else 0
        num_tokens = num_blocks * config.device.block_size
        yield TierSize(tier, capacity_bytes, num_blocks, num_tokens, num_states, origin)


def _refusals(tiers: list[TierSize], layout: PagedLayout) -> Iterator[str]:
    for tier in tiers:
        minimum = MIN_SLOTS[tier.name]
        needed = layout.capacity_for(minimum, minimum)
        if tier.name == "disk":
            needed = max_bytes(needed)
        if min(layout.num_slots(tier.capacity_bytes, minimum)) < minimum:
            is_short_of_blocks = layout.num_attention_groups and tier.num_blocks < minimum
            held = f"{tier.num_blocks} blocks" if is_short_of_blocks else f"{tier.num_states} states"
            yield f"{tier.name}.capacity: holds {held}; use {needed} bytes or more"


def _refused_codecs(config: Config, layout: PagedLayout) -> Iterator[str]:
    for tier, settings in (("disk", config.disk), ("remote", config.remote)):
        try:
            if layout.states.tensors:
                refuse_lossy(settings, tier)
        except ValueError as error:
            yield str(error)


def _refused_retention(config: Config, layout: PagedLayout) -> Iterator[str]:
    try:
        Retention(layout.groups, config.device.retention_tokens)
    except ValueError as error:
        yield f"device.retention_tokens: {str(error).removeprefix('retention: ')}"


def _refused_folders(config: Config) -> Iterator[str]:
    folders = {"disk.path": None if config.disk is None else Path(config.disk.path)}
    folders["documents.path"] = documents_path(config)
    for key, folder in folders.items():
        if folder is None:
            continue
        there = _nearest(folder)
        if not there.is_dir():
            yield f"{key}: {there} is not a folder; use another one"
        elif not os.access(there, os.W_OK | os.X_OK):
            yield f"{key}: {there} is not writable; use another folder"


def _refused_log(config: Config) -> Iterator[str]:
    try:
        refuse_unusable(config.request_log)
    except OSError as error:
        yield str(error)


def _refused_adapters(config: Config, skeleton: PreTrainedModel) -> Iterator[str]:
    for name, table in config.lora.items():
        try:
            load_adapter(skeleton, name, table.path)
        except (UnusableLora, MissingExtra) as error:
            yield str(error)


def _remarks(
    checkpoint: Checkpoint, config: Config, model_tokens: int | None, longest: int, layout: PagedLayout
) -> Iterator[str]:
    server = config.server
    if model_tokens is not None and longest < model_tokens:
        needed = layout.capacity_for(-(-model_tokens // config.device.block_size))
        these = f"requests from {longest + 1:,} to {model_tokens:,} tokens"
        yield f"{these}: device.capacity {size_text(needed)} would hold them"
    if server.max_prompt_tokens is not None and server.max_prompt_tokens >= longest:
        yield f"server.max_prompt_tokens: no prompt can have more than {longest - 1:,} tokens anyway"
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if config.host is not None and config.host.capacity > memory_bytes * 3 // 4:
        yield f"host.capacity: more than three quarters of this machine's memory, {size_text(memory_bytes)}"
    if config.disk is not None:
        free_bytes = _free_bytes(Path(config.disk.path))
        if config.disk.capacity > free_bytes:
            yield f"disk.capacity: only {size_text(free_bytes)} are free, in addition to the space of an existing store"
    try:
        tokenizer = checkpoint.tokenizer()
        if tokenizer.chat_template is None:
            yield "/v1/chat/completions: the tokenizer has no chat template"
        for role in sorted(TemplateTraits.of(tokenizer, has_tools=False).lost_roles):
            yield f"/v1/chat/completions: the chat template drops the text of messages with the role {role}"
    except ValueError:
        yield "the tokenizer: the model has none, and the server does not start without one"


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(_nearest(folder)).free


def _nearest(path: Path) -> Path:
    """Return *path* if it exists, else its nearest parent that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())
