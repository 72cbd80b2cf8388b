"""The page docs/reference/metrics-compat.md: kvtier's numbers under the names of vLLM and LMCache, and their boards."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from page_text import bullet, paragraph
from peer_boards import BOARDS, Board, Panel

from kvtier.engine.observability.metrics.compat.lmcache_names import LMCACHE_CATALOGUE
from kvtier.engine.observability.metrics.compat.vllm_names import VLLM_CATALOGUE
from kvtier.engine.observability.metrics.metric_name import MetricName

INTRODUCTION = """# Metrics under other names

Grafana dashboards made for vLLM or LMCache can show kvtier. To export kvtier's numbers under the names of these
projects too, set this in the configuration of `kvtier serve`:

```toml
[metrics]
compat = ["vllm", "lmcache"]
```

In the configuration of `kvtier sidecar`, set `compat = ["lmcache"]`. The engines export vLLM's names themselves.

Names, kinds, suffixes and labels are those of vLLM 0.33 and LMCache 0.5.7rc2. They were compared with LMCache's wheel,
with the wheel of vLLM 0.32, and with the current dashboards of both. On two cores, an engine exports about 310 lines in
2.5 ms without `compat`, and 670 lines in 7 ms with `compat = ["vllm", "lmcache"]`.

This page is generated from the code by `make reference`.
"""
VLLM = """
## vLLM's names

Each metric also has the labels `model_name` and `engine`. kvtier also exports the usual `process_` metrics of
`prometheus_client`: CPU, memory, open files and start time.

"""
LMCACHE = """
## LMCache's names

L0 is the device, L1 host memory and L2 the disk. A sidecar leaves the label `model_name` empty, because otherwise its
clients could create any number of labels.

"""
PANELS = """
## Panel by panel

This section lists the panels of vLLM's and LMCache's dashboards, and whether kvtier has data for them. *In part* means
that only some of the panel's lines have data. A sidecar has no numbers of copies to and from the device, and none of
requests whose prefix is being loaded. Only engines have those.

A test lets a real Prometheus scrape an engine and a sidecar under load, and runs each query of the dashboards. The
queries are in `tests/engine/observability/metrics/boards/`, unchanged from their repositories.
"""
OF_VLLM = {  # meanings of names, which are separated by a blank and written without their prefix
    "prompt_tokens": "prompt tokens",
    "prompt_tokens_cached": "prompt tokens that came from any tier",
    "prompt_tokens_by_source": "prompt tokens: `local_compute` were computed, `local_cache_hit` came from the device, "
    "and `external_kv_transfer` from a lower tier",
    "prompt_tokens_cached_by_source": "prompt tokens that came from `device`, `host` or `disk`; `external_unspecified` "
    "is a remote tier, and `p2p` stays 0",
    "prefix_cache_queries": "tokens looked up",
    "prefix_cache_hits": "tokens that were on the device",
    "external_prefix_cache_queries": "tokens looked up that were not on the device",
    "external_prefix_cache_hits": "tokens that came from a lower tier",
    "kv_cache_usage_perc": "fraction of the device tier that requests or copies have leased. As in vLLM, blocks that "
    "are only cached count as free",
    "num_preemptions": "preempted requests, counted at their readmission",
    "num_requests_running": "running requests",
    "num_requests_waiting": "requests that wait, including those whose prefix is being loaded",
    "num_requests_waiting_by_reason": "waiting requests: `deferred` if the prefix is being loaded, else `capacity`",
    "time_to_first_token_seconds inter_token_latency_seconds": "time to the first token, and time between tokens. "
    "Histograms with vLLM's buckets, counted by the engine when each token is generated",
    "generation_tokens": "generated tokens",
    "request_success": "finished requests by reason: `stop`, `length` or `abort`. `error` and `repetition` stay 0",
    "e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds "
    "request_time_per_output_token_seconds": "histograms over finished requests. The prefill time includes the loading "
    "of the prefix",
    "request_prompt_tokens": "histogram of the prompt tokens of finished requests",
    "request_generation_tokens": "histogram of the generated tokens of finished requests",
    "request_prefill_kv_computed_tokens": "histogram of the computed prompt tokens of finished requests",
    "kv_block_idle_before_evict_seconds": "seconds since the last use of blocks evicted from the device",
    "kv_offload_load_bytes kv_offload_load_time": "bytes and seconds of copies from host memory to the device",
    "kv_offload_store_bytes kv_offload_store_time": "bytes and seconds of copies from the device to host memory",
}
_ARTICLES = {"engine": "an engine", "sidecar": "a sidecar"}
OF_LMCACHE = {
    "lookup_requested_tokens": "prompt tokens that were not on the device",
    "lookup_hit_tokens": "prompt tokens that came from host memory, disk or a remote tier",
    "lookup_hit_l1_tokens": "prompt tokens that came from host memory",
    "lookup_hit_l2_tokens": "prompt tokens that came from disk or a remote tier",
    "lookup_prompt_tokens": "all prompt tokens",
    "lookup_request_hit_tokens": "prompt tokens that came from any tier, including the device. A sidecar counts tokens "
    "on the device only for clients with lmcache 0.5.7",
    "num_chunks_loaded": "blocks copied to the device; at a sidecar, chunks that engines have loaded",
    "l1_memory_usage_bytes": "bytes of the blocks in host memory",
    "l1_usage_ratio": "bytes of the blocks in host memory, as a fraction of its capacity",
    "l1_read_chunks": "blocks read from host memory, by engines or to write them to disk",
    "l1_write_chunks": "blocks written to host memory, by engines or after they were read from disk",
    "l1_evicted_chunks": "blocks evicted from host memory",
    "l1_read_failure_chunks": "blocks in host memory whose load gave no valid bytes",
    "l0_block_idle_before_evict_seconds": "seconds since the last use of blocks evicted from the device (not at a "
    "sidecar)",
    "l1_chunk_idle_before_evict_seconds": "seconds since the last use of blocks evicted from host memory",
    "l2_usage_bytes": "bytes of the blocks on disk. `l2_name` is always `disk`",
    "l2_evicted_objects_chunks": "blocks evicted from disk",
    "l2_prefetch_failure_chunks": "blocks on disk whose load gave no valid bytes, by cause",
    "l2_store_submitted_requests": "batches queued for writing to disk",
    "l2_store_submitted_objects_chunks": "blocks in the batches queued for writing to disk",
    "l2_store_completed_objects_chunks": "blocks written to disk",
    "l2_store_completed_requests": "batches written to disk",
    "l2_load_completed_requests": "batches read from disk",
    "l2_prefetch_load_submitted_requests": "batches queued for reading from disk",
    "l2_prefetch_load_submitted_objects_chunks": "blocks in the batches queued for reading from disk",
    "l2_prefetch_load_completed_chunks": "blocks read from disk",
    "num_inflight_l2_stores": "batches that wait to be written to disk, or are being written",
    "num_inflight_l2_loads": "batches that wait to be read from disk, or are being read",
    "inflight_load_memory_usage_bytes": "bytes of the batches that wait to be read from disk, or are being read",
    "active_prefetch_jobs": "requests whose prefix is being loaded (not at a sidecar)",
    "num_submitted_stores num_finished_stores": "copies from the device to host memory. Not at a sidecar, because "
    "engines make these copies",
    "num_submitted_retrieves num_finished_retrieves": "copies from host memory to the device. Not at a sidecar, "
    "because engines make these copies",
    "transfer_phase_bytes transfer_phase_elapsed_seconds": "bytes and seconds of the copies between device and host "
    "memory. The direction is `d2h` (to host memory) or `h2d` (to the device), and the phase is always `staging`. Not "
    "at a sidecar",
}


def metrics_compat_page() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    parts += [VLLM, *_items(OF_VLLM, "vllm:", VLLM_CATALOGUE, {"model_name", "engine"})]
    parts += [LMCACHE, *_items(OF_LMCACHE, "lmcache_mp_", LMCACHE_CATALOGUE, set())]
    parts += [PANELS, *map(_board, BOARDS.values()), "\n"]
    parts += [f"[{_link_name(board)}]: {board.url}\n" for board in BOARDS.values()]
    return "".join(parts)


def names_with_meaning() -> set[str]:
    """All names that the page explains."""
    found = ((OF_VLLM, "vllm:"), (OF_LMCACHE, "lmcache_mp_"))
    return {f"{prefix}{name}" for meanings, prefix in found for names in meanings for name in names.split()}


def _items(meanings: Mapping[str, str], prefix: str, catalogue: Sequence[MetricName], known: set[str]) -> Iterator[str]:
    labels = {each.name: [label for label in each.labels if label not in known] for each in catalogue}
    for names, meaning in meanings.items():
        whole = [f"{prefix}{name}" for name in names.split()]
        shown = [f"`{name}{{{', '.join(labels[name])}}}`" if labels[name] else f"`{name}`" for name in whole]
        yield bullet(", ".join(shown), meaning)


def _board(board: Board) -> str:
    has_sidecar = any(query.expr.startswith("lmcache") for panel in board.panels for query in panel.queries)
    by = ["engine", "sidecar"] if has_sidecar else ["engine"]
    complete = [panel.title for panel in board.panels if all(panel.how_far(each) == "yes" for each in by)]
    others = [panel for panel in board.panels if any(panel.how_far(each) != "yes" for each in by)]
    told = f"\n### {board.title}\n\n"
    told += paragraph(f"The dashboard is [{Path(board.path).name}][{_link_name(board)}] of {board.repository}.") + "\n"
    if complete:
        told += bullet("With data", f"{', '.join(f'*{title}*' for title in complete)}.")
    titles: dict[str, list[str]] = {}
    for panel in others:
        titles.setdefault(_how_far(panel, by), []).append(f"*{panel.title}*")
    return told + "".join(bullet(", ".join(dict.fromkeys(alike)), how) for how, alike in titles.items())


def _link_name(board: Board) -> str:
    return Path(board.path).stem


def _how_far(panel: Panel, by: Sequence[str]) -> str:
    """Return how much of a panel is served, and why the rest is not."""
    found = [panel.how_far(each) for each in by]
    words = {"yes": "with data", "no": "no data", "in part": "in part"}
    if len(set(found)) == 1:
        told = words[found[0]]
    else:
        told = ", ".join(f"{words[how]} from {_ARTICLES[each]}" for each, how in zip(by, found, strict=True))
    why = list(dict.fromkeys(query.not_served for query in panel.queries if query.not_served))
    text = "".join(f"{each}. " for each in [told, *why]).strip()
    return re.sub(r"\b(kvtier_\w+|vllm:\w+|GET /v1/models)", r"`\1`", text)
