"""The figures of docs/explanation/choosing.md are those of the committed results."""

import json
import re

import pytest
from markdown_links import ROOT

PAGE = ROOT / "docs" / "explanation" / "choosing.md"
# Each figure: the file in bench/results/, the row in it, how the page writes the value, and words of the page's entry.
FIGURES = [
    ("strangers", "long-doc-qa: mean TTFT, with tiers", "{:.0f} ms", "Mean TTFT of questions"),
    ("strangers", "long-doc-qa: mean TTFT, after a restart", "{:.0f} ms", "Mean TTFT of questions"),
    ("strangers", "long-doc-qa: mean TTFT, device only", "{:.0f} ms", "Mean TTFT of questions"),
    ("strangers", "long-doc-qa: mean TTFT, vLLM's server", "{:,.0f} ms", "Mean TTFT of questions"),
    ("connectors_cost", "disk, after a restart of both: TTFT", "{:.0f} ms", "vLLM on kvtier's connector"),
    ("connectors_cost", "cold, 8194 tokens: TTFT", "{:,.0f} ms", "vLLM on kvtier's connector"),
    (
        "connectors_cost",
        "nothing reused: throughput of that without a connector",
        "{:.2f}",
        "throughput of vLLM with kvtier's connector",
    ),
    (
        "connectors_cost",
        "nothing reused, a model of 4 layers: throughput of that without a connector",
        "{:.2f}",
        "throughput of vLLM with kvtier's connector",
    ),
    (
        "connectors_cold",
        "cold, 3074 tokens: TTFT of that without, connector",
        "{:.2f}",
        "TTFT of a prompt of 3,074 tokens",
    ),
    (
        "connectors_cold",
        "cold, 3074 tokens: TTFT of that without, vLLM's offloading",
        "{:.2f}",
        "TTFT of a prompt of 3,074 tokens",
    ),
    (
        "connectors_cold",
        "cold, 3074 tokens: TTFT of that without, LMCache",
        "{:.2f}",
        "TTFT of a prompt of 3,074 tokens",
    ),
    ("connectors_tiers", "restart, kvtier: TTFT", "{:.0f} ms", "TTFT of a hit on disk in vLLM's offloading"),
    ("connectors_tiers", "restart, fs: TTFT", "{:.0f} ms", "TTFT of a hit on disk in vLLM's offloading"),
    (
        "connectors_tiers",
        "nothing reused, kvtier: throughput of that without a connector",
        "{:.2f}",
        "`tier_cost`",
    ),
    ("connectors_tiers", "nothing reused, fs: throughput of that without a connector", "{:.2f}", "`tier_cost`"),
    ("connectors_tiers", "churn, kvtier: taken at most, of the capacity", "{:.2f}", "disk space that is in use"),
    ("connectors_tiers", "churn, fs: taken at most, of the capacity", "{:.1f}", "disk space that is in use"),
    ("connectors_peers", "private memory, load: kvtier", "{:.1f}", "LMCache's server loads chunks"),
    ("connectors_peers", "shared memory, load again: kvtier", "{:.1f} GB/s", "LMCache's server loads chunks"),
    ("connectors_peers", "shared memory, load: fs_native", "{:.1f}", "LMCache's server loads chunks"),
    ("connectors_peers", "shared memory, store: kvtier", "{:.2f} GB/s", "LMCache's server stores chunks"),
    ("connectors_peers", "shared memory, store: fs_native", "{:.2f} GB/s", "LMCache's server stores chunks"),
    (
        "sidecar_speed",
        "lookup of 32,768 tokens, all hits again: of LMCache's server's time",
        "{:.1f}",
        "looks up 32,768 or",
    ),
    (
        "sidecar_speed",
        "lookup of 131,072 tokens, all hits again: of LMCache's server's time",
        "{:.1f}",
        "looks up 32,768 or",
    ),
    (
        "sidecar_speed",
        "lookup of 32,768 tokens, all hits: of LMCache's server's time",
        "{:.1f}",
        "looks up 32,768 or",
    ),
    (
        "sidecar_speed",
        "store: LMCache's client, GB/s of LMCache's server",
        "{:.1f} times",
        "LMCache's client stores",
    ),
    ("sidecar_crowd", "8 clients: lookup of 4,096 tokens, p99", "{:.0f} ms", "eight LMCache clients"),
    ("sidecar_crowd", "8 clients, LMCache's server: lookup of 4,096 tokens, p99", "{:.0f} ms", "eight LMCache clients"),
    (
        "store_peers",
        "hot read, 64 KiB, 4 threads: kvtier / files",
        "{:.2f}",
        "Reads from the page cache: kvtier's store",
    ),
    ("store_peers", "cold read, 64 KiB, 1 thread: kvtier / files", "{:.1f} times", "Reads from the drive"),
    ("store_race", "store, 1 MiB: kvtier / raw O_DIRECT, 4 threads", "{:.2f}", "Stores of blocks of 1 MiB"),
    ("store_race", "store, 1 MiB: kvtier / files", "{:.2f}", "Stores of blocks of 1 MiB"),
    ("store_race", "store, 1 MiB: kvtier, CPU", "{:.2f} s", "Stores of blocks of 1 MiB"),
    ("store_race", "store, 128 KiB: kvtier / raw O_DIRECT, 4 threads", "{:.2f}", "Stores of blocks of 128 KiB"),
    ("store_race", "store, 128 KiB: kvtier, CPU", "{:.2f} s", "Stores of blocks of 128 KiB"),
    ("store_race", "load cold, 1 MiB: kvtier / raw O_DIRECT, 8 threads", "{:.2f}", "Verified loads from the drive"),
    ("store_race", "load cached, 1 MiB: kvtier / raw preadv", "{:.2f}", "Verified loads from the drive"),
    ("store_race", "flush of host memory: time of raw O_DIRECT, 4 threads", "{:.1f} times", "At shutdown"),
    ("remote_speed", "load again, 32 of 1 MiB: kvtier / LMCache resp", "{:.2f}", "Loads of blocks of 1 MiB from Redis"),
    ("miss_cost", "TTFT, tiers on / off, median of pairs", "{:.2f}", "Nothing cached"),
]


def entries() -> list[str]:
    """The entries of the page's lists, each in one line."""
    found = re.findall(r"^- .*(?:\n  .*)*", PAGE.read_text(), re.MULTILINE)
    return [" ".join(entry.split()) for entry in found]


@pytest.mark.parametrize(("result", "name", "style", "question"), FIGURES, ids=lambda value: str(value)[:40])
def test_a_figure_on_the_page_is_that_of_the_committed_result(
    result: str, name: str, style: str, question: str
) -> None:
    rows = json.loads((ROOT / "bench" / "results" / f"{result}.json").read_text())["rows"]
    (value,) = (row["value"] for row in rows if row["name"] == name)
    (entry,) = (entry for entry in entries() if question in entry)

    assert style.format(value) in entry


@pytest.mark.parametrize("cache", ["connector", "vLLM's offloading", "LMCache", "Lifeboat Cache"])
def test_a_row_of_the_table_of_caches_in_vllm_is_that_of_the_committed_result(cache: str) -> None:
    rows = json.loads((ROOT / "bench" / "results" / "connectors_head_to_head.json").read_text())["rows"]
    values = {row["name"]: f"{row['value']:,.0f} ms" for row in rows if row["unit"] == "ms"}
    names = [
        f"{load}, {cache}: {what}"
        for load, what in (
            ("quiet", "cold, mean TTFT"),
            ("quiet", "warm, mean TTFT"),
            ("beside 2 busy loops", "cold, mean TTFT"),
            ("beside 2 busy loops", "warm, mean TTFT"),
            ("beside 2 busy loops", "warm, p99 of TTFT"),
        )
    ]

    cells = re.findall(r"^\|(?: [^|]* \|){4} [^|]*\([^|]*\) \|$", PAGE.read_text(), re.MULTILINE)
    shown = [re.findall(r"[\d,]+ ms", cell) for cell in cells]

    assert [values[name] for name in names] in shown
