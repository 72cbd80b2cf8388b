"""How soon do answers of the Messages API begin with `cache_control`, with and without tiers; does the usage add up?

Twenty documents, ten questions each, asked one after the other by the `anthropic` client. The device has room for two
documents; with tiers host memory has room to keep all of them. In each round every document is asked about once, of a
server with tiers and of one without. The bundled model looks facts up, so a wrong block shows as a wrong answer.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import anthropic
from anthropic.types import DocumentBlockParam, TextBlockParam

from bench.report import Row, arguments, publish
from bench.server.serving_bed import BLOCK_SIZE, MODEL, kvtier_server
from kvtier.cli.demo.document import Document, make_document
from kvtier.cli.demo.model import build_demo_model

NUM_TOKENS = 2048  # of a document
ANSWER_TOKENS = 4
TIMES_SOONER = 3
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if not loop.last %}\n{% endif %}{% endfor %}"


@dataclass(frozen=True)
class Seen:
    """One answer as its client saw it."""

    ttft_s: float  # until the first text
    is_right: bool
    num_read: int
    num_created: int
    num_other: int
    by_tier: dict[str, int]

    @property
    def adds_up(self) -> bool:
        """Whether the usage is that of the tiers: what was read came from one, and all is counted once."""
        cached = sum(self.by_tier.values()) - self.by_tier["recomputed"]
        return self.num_read == cached and self.num_created + self.num_other == self.by_tier["recomputed"]


def main() -> None:
    """Start both servers on the same model, and ask them in turn."""
    options = arguments(__doc__ or "").parse_args()
    num_documents, num_rounds, num_tokens = options.effort.of((20, 10, NUM_TOKENS), quick=(4, 2, 1024))
    with tempfile.TemporaryDirectory() as name, ExitStack() as servers:
        folder = Path(name)
        token_bytes = save_model(folder / "model")
        device = {"capacity": int(2.2 * num_tokens * token_bytes), "block_size": BLOCK_SIZE}
        # Half of host memory may be kept; a tenth is for what documents are longer than asked for, and for templates.
        hosts = {"with tiers": int(2.2 * num_documents * num_tokens * token_bytes), "device only": 0}
        urls = {
            which: servers.enter_context(
                kvtier_server(folder / "model", folder, {"device": device, "host": {"capacity": capacity}})
            )
            for which, capacity in hosts.items()
        }
        seen = ask_in_turn(urls, [make_document(number, num_tokens) for number in range(num_documents)], num_rounds)
    publish("cache_control", rows_of(seen["with tiers"], seen["device only"]), options.json)


def save_model(folder: Path) -> int:
    """Save the bundled model with a template that adds nothing behind the question; its bytes of KV for a token."""
    model, tokenizer = build_demo_model()
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    values: int = 2 * config.num_hidden_layers * num_kv_heads * head_dim
    return values * model.dtype.itemsize


def ask_in_turn(urls: dict[str, str], documents: Sequence[Document], num_rounds: int) -> dict[str, list[list[Seen]]]:
    """The answers of each server, by round; the order of the documents is another one in each round."""
    rng = random.Random(1)
    clients = {which: anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) for which, url in urls.items()}
    seen: dict[str, list[list[Seen]]] = {which: [] for which in urls}
    for number in range(num_rounds):
        order = rng.sample(documents, len(documents))
        for which, client in clients.items():
            seen[which].append([ask(client, document, number) for document in order])
    return seen


def ask(client: anthropic.Anthropic, document: Document, number: int) -> Seen:
    """Ask for the document's fact of that number."""
    fact = document.facts[number % len(document.facts)]
    content: list[DocumentBlockParam | TextBlockParam] = [
        {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": document.text},
            "cache_control": {"type": "ephemeral"},
        },
        {"type": "text", "text": f"The book says that the code of {fact.name} is"},
    ]
    asked_at, ttft_s, text = time.perf_counter(), None, ""
    stream = client.messages.create(
        model=MODEL,
        max_tokens=ANSWER_TOKENS,
        messages=[{"role": "user", "content": content}],
        stream=True,
        extra_body={"temperature": 0},
    )
    for event in stream:
        if event.type == "message_start":
            usage = event.message.usage
        elif event.type == "content_block_delta" and event.delta.type == "text_delta":
            ttft_s = ttft_s or time.perf_counter() - asked_at
            text += event.delta.text
        elif event.type == "message_delta":
            by_tier = (event.model_extra or {})["kvtier"]["tokens"]
    return Seen(
        ttft_s or time.perf_counter() - asked_at,
        text.split()[:1] == [fact.word],
        usage.cache_read_input_tokens or 0,
        usage.cache_creation_input_tokens or 0,
        usage.input_tokens,
        by_tier,
    )


def rows_of(tiered: list[list[Seen]], device_only: list[list[Seen]]) -> list[Row]:
    """The figures: all rounds, and the first one apart, in which nothing is there to be read."""
    of_tiered, of_device = ([seen for each in rounds for seen in each] for rounds in (tiered, device_only))
    mean, baseline = (statistics.mean(seen.ttft_s for seen in each) for each in (of_tiered, of_device))
    later = [seen for each in tiered[1:] for seen in each]
    ratios = [
        statistics.mean(seen.ttft_s for seen in without) / statistics.mean(seen.ttft_s for seen in with_tiers)
        for with_tiers, without in zip(tiered[1:], device_only[1:], strict=True)
    ]
    everything = [*of_tiered, *of_device]
    adding_up = statistics.mean(seen.adds_up for seen in everything)
    right = statistics.mean(seen.is_right for seen in everything)
    created = sum(seen.num_created for seen in later)
    return [
        Row("mean TTFT, device only", 1000 * baseline, "ms"),
        Row("mean TTFT with tiers, the first round included", 1000 * mean, "ms"),
        Row(
            "device only / with tiers",
            baseline / mean,
            "x",
            f">= {TIMES_SOONER}",
            baseline >= TIMES_SOONER * mean,
            varies=True,
        ),
        Row("  rounds after the first, median", statistics.median(ratios), "x"),
        Row("  least of these rounds", min(ratios), "x"),
        Row("  first round, in which all is computed, mean TTFT", 1000 * _mean_ttft(tiered[0]), "ms"),
        Row("  rounds after the first, mean TTFT", 1000 * _mean_ttft(later), "ms"),
        Row("tokens of prompts, with tiers", sum(sum(seen.by_tier.values()) for seen in of_tiered), "tokens"),
        Row("  created in the first round", sum(seen.num_created for seen in tiered[0]), "tokens"),
        Row("  created in later rounds", created, "tokens", "0", not created),
        Row("  read", sum(seen.num_read for seen in of_tiered), "tokens"),
        Row("answers whose usage adds up, and is the tiers'", 100 * adding_up, "%", "100 %", adding_up == 1),
        Row("right answers", 100 * right, "%", "100 %", right == 1),
    ]


def _mean_ttft(seen: Sequence[Seen]) -> float:
    return statistics.mean(each.ttft_s for each in seen)


if __name__ == "__main__":
    main()
