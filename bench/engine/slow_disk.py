"""On a disk about as fast as computing: how soon does the first token come if a hit is loaded, planned or split?

Uses the real engine and store, the demo's model, and documents that only the disk has. Reads take as long as on disks
that need half, all, and twice the time of computing the document.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from bench.report import Row, arguments, publish
from kvtier import SamplingParams
from kvtier.cli.demo.model import build_demo_model
from kvtier.engine.llm import LLM
from kvtier.engine.stores import reopening_store
from kvtier.store.process.store_process import StoreProcess
from kvtier.store.record import Fault

BLOCK_SIZE = 32
ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)
WAYS = ("always", "cost", "split")
RATIOS = {"half the time": 0.5, "the same time": 1.0, "twice the time": 2.0}


class SlowStore(StoreProcess):
    """A real store whose reads are as slow as on a disk of `bytes_per_s`, one after another."""

    bytes_per_s = float("inf")
    _disk = threading.Lock()

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        with self._disk:
            started_at = time.monotonic()
            found = super().read_many(keys, outs)
            seconds = sum(map(len, outs)) / self.bytes_per_s
            time.sleep(max(0.0, seconds - (time.monotonic() - started_at)))
            return found


def document(number: int, vocab_size: int, num_tokens: int) -> list[int]:
    """Token ids that no two documents share."""
    return [5 + (place * 7919 + number * 104_729) % (vocab_size - 5) for place in range(num_tokens)]


class Bed:
    """The demo's model over a store that holds every document, and a device and a host that hold one of them."""

    def __init__(self, folder: Path, num_documents: int, num_tokens: int) -> None:
        self._folder = folder
        self._model, self._tokenizer = build_demo_model()
        config = self._model.config
        self.documents = [document(number, config.vocab_size, num_tokens) for number in range(num_documents)]
        self._new_ones = [document(-number, config.vocab_size, num_tokens) for number in (1, 2)]
        num_heads = config.num_key_value_heads or config.num_attention_heads
        head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        self.document_bytes = num_tokens * 2 * 4 * config.num_hidden_layers * num_heads * head_dim
        with self.engine("always") as llm:
            done = [llm.generate(document, ONE_TOKEN)[0] for document in self.documents]
        self.cold_s = statistics.median(completion.ttft_s for completion in done)

    def engine(self, load: str) -> LLM:
        capacity = int(1.25 * self.document_bytes)
        tables = {
            "device": {"capacity": capacity, "block_size": BLOCK_SIZE},
            "host": {"capacity": capacity},
            "disk": {"path": str(self._folder / "store"), "capacity": "8GiB", "read_timeout_s": 600},
            "scheduler": {"load": load, "by_layers": False},
        }
        return LLM(self._model, tables, self._tokenizer)

    def ttfts(self, load: str, rounds: int) -> tuple[list[float], float]:
        """TTFTs of questions about each document, after a round to learn the speeds; and the share of tokens loaded."""
        seconds, loaded, asked = [], 0, 0
        with self.engine(load) as llm:
            for new in self._new_ones:  # so that the device's speed is known
                llm.generate(new, ONE_TOKEN, skip_reading_prefix_cache=True)
            for turn in range(1 + rounds):
                for known in self.documents:
                    done = llm.generate([*known, 1 + turn], ONE_TOKEN)[0]
                    if turn:
                        seconds.append(done.ttft_s)
                        loaded += done.tokens.disk
                        asked += done.tokens.num_tokens
        return seconds, loaded / asked


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="questions about each document (2)")
    options = parser.parse_args()
    num_documents, num_tokens = options.effort.of(4, quick=2), options.effort.of(2048, quick=256)
    num_rounds = options.rounds or options.effort.of(2, quick=1)
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder,
        patch.object(reopening_store, "StoreProcess", SlowStore),
    ):
        bed = Bed(Path(folder), num_documents, num_tokens)
        rows.append(Row(f"computing a document of {num_tokens} tokens", bed.cold_s, "s"))
        for name, ratio in RATIOS.items():
            SlowStore.bytes_per_s = bed.document_bytes / (ratio * bed.cold_s)
            medians = {}
            for load in WAYS:
                seconds, share = bed.ttfts(load, num_rounds)
                medians[load] = statistics.median(seconds)
                rows.append(Row(f"disk needs {name}: {load}, median TTFT", medians[load], "s"))
                rows.append(Row("  of the tokens loaded", 100 * share, "%"))
            gain = medians["split"] / min(medians["always"], medians["cost"])
            rows.append(
                Row(f"disk needs {name}: split / the better of the others", gain, "x", "< 1", gain < 1, varies=True)
            )
    publish("slow_disk", rows, options.json)


if __name__ == "__main__":
    main()
