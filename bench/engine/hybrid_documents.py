"""What is the TTFT of a second question about a document, with a model that has recurrent states?

The model is a small Qwen3.5, which has three layers of linear attention for each with full attention, with random
weights. Twenty documents are asked about twice, one after the other; the device holds three of them. An engine with all
tiers and one with the device only take turns. Finally, the engine with tiers restarts and is asked a third time.
"""

import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from bench.report import Row, arguments, publish
from kvtier import LLM, SamplingParams
from kvtier.engine.model.paged_layout import layout_of

BLOCK_SIZE = 16
VOCAB = 256
ON_DEVICE = 3  # documents
QUESTION_TOKENS = 24
MAX_SHARE = 1 / 7  # of the TTFT with the device only
ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)
KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]


def small_model() -> PreTrainedModel:
    """Return a model with the layers of Qwen3.5, four of them, and a narrow hidden state."""
    torch.manual_seed(7)
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=len(KINDS),
        layer_types=KINDS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=1 << 17,
    )
    model: Any = Qwen3_5ForCausalLM(config)
    return model.eval()


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one word for each token id. Prompts are token ids, so it only decodes."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({str(i): i for i in range(VOCAB)}, "0")))


class Desk:
    """An engine with the device alone, an engine with all tiers, and prompts about the same documents."""

    def __init__(self, folder: Path, num_documents: int, num_tokens: int) -> None:
        self._model, self._folder = small_model(), folder
        rng = random.Random(1)
        self.documents = [rng.choices(range(VOCAB), k=num_tokens) for _ in range(num_documents)]
        layout = layout_of(self._model, BLOCK_SIZE)
        assert layout.state_interval is not None, "the model has states"
        self.interval = layout.state_interval
        # A document, a question, and the states that are kept of both, at the interval and at their ends.
        num_blocks = -(-(num_tokens + QUESTION_TOKENS) // BLOCK_SIZE) + 1
        num_states = num_tokens // self.interval + 3
        self._document_bytes = num_blocks * layout.token_block_bytes + num_states * layout.states.slot_bytes

    def engine(self, has_tiers: bool) -> LLM:
        """Return a new engine whose device holds `ON_DEVICE` documents."""
        tables: dict[str, Any] = {
            "device": {"capacity": ON_DEVICE * self._document_bytes, "block_size": BLOCK_SIZE},
            "host": {"capacity": 0},
            "scheduler": {"load": "always"},
        }
        if has_tiers:
            tables["host"] = {"capacity": len(self.documents) * self._document_bytes // 2}
            tables["disk"] = {"path": str(self._folder / "store"), "capacity": "4GiB", "read_timeout_s": 600}
        return LLM(self._model, tables, word_tokenizer())

    def ask(self, engines: Sequence[LLM], seed: int) -> Iterator[tuple[float, ...]]:
        """Ask each engine a new question about each document; yield the seconds to their first tokens.

        Raises AssertionError if two engines answer differently.
        """
        rng = random.Random(seed)
        for document in self.documents:
            prompt = document + rng.choices(range(VOCAB), k=QUESTION_TOKENS)
            done = [llm.generate(prompt, ONE_TOKEN)[0] for llm in engines]
            assert len({tuple(answer.token_ids) for answer in done}) == 1, "the engines answer differently"
            yield tuple(answer.ttft_s for answer in done)


def main() -> None:
    """Measure the times to the first token, and publish the rows."""
    options = arguments(__doc__ or "").parse_args()
    num_documents, num_tokens = options.effort.of(20, quick=4), options.effort.of(8_000, quick=600)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        desk = Desk(Path(folder), num_documents, num_tokens)
        alone, tiers = stack.enter_context(desk.engine(False)), desk.engine(True)
        list(desk.ask([alone, tiers], seed=2))
        second = list(desk.ask([alone, tiers], seed=3))
        tiers.close()
        restarted = stack.enter_context(desk.engine(True))
        third = list(desk.ask([alone, restarted], seed=4))
    share, share_restarted = (
        statistics.median(with_tiers / device for device, with_tiers in pairs) for pairs in (second, third)
    )
    documents = f"{num_documents} documents of {num_tokens:,} tokens"
    rows = [
        Row("a state is kept every", desk.interval, "tokens"),
        Row(f"{documents}: TTFT, device only", statistics.median(pair[0] for pair in second), "s"),
        Row(f"{documents}: TTFT, all tiers", statistics.median(pair[1] for pair in second), "s"),
        Row(f"{documents}: TTFT, all tiers, after a restart", statistics.median(pair[1] for pair in third), "s"),
        Row("all tiers / device only", share, "", f"<= {MAX_SHARE:.3f}", share <= MAX_SHARE, varies=True),
        Row(
            "all tiers after a restart / device only",
            share_restarted,
            "",
            f"<= {MAX_SHARE:.3f}",
            share_restarted <= MAX_SHARE,
            varies=True,
        ),
    ]
    publish("hybrid_documents", rows, options.json)


if __name__ == "__main__":
    main()
