"""The models of gpu_serving, with random weights: one of Llama-3.1-8B's shape, and a tiny one for any machine.

Each comes with the sizes and counts of what is measured with it, so that both run the same code.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

from kvtier.engine.model import runner
from kvtier.engine.model.digest import weights_digest

DTYPE = torch.bfloat16
ROPE_THETA = 500_000.0


@dataclass(frozen=True)
class Pools:
    """Sizes of the tiers, in tokens."""

    device: int
    host: int
    disk: int


@dataclass(frozen=True)
class Documents:
    """Part (b): lengths of the documents, and of the question about them, in tokens."""

    lengths: tuple[int, ...]  # tokens, whole blocks
    promised: int  # the one of the lengths that promises are about
    question: int
    chunk: int  # tokens computed in a step: many, so that recomputing is as fast as it gets
    pools: Pools


@dataclass(frozen=True)
class Decoding:
    """Part (c): a batch whose decoding evicts the blocks of the batch before it."""

    num_requests: int
    context: int
    steps: int  # of one engine before the next one's turn
    turns: int  # of each engine with one batch
    rounds: int  # batches, at most
    pools: Pools


@dataclass(frozen=True)
class Misses:
    """Part (d): new prompts, one alone and several at once."""

    alone: int
    at_once: int
    num_at_once: int
    max_tokens: int
    rounds: int
    pools: Pools


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, and of what is measured with it."""

    name: str
    model: Mapping[str, int]  # arguments of a `LlamaConfig`
    block_size: int
    documents: Documents
    decoding: Decoding
    misses: Misses

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        sizes = self.model
        heads_bytes = sizes["num_key_value_heads"] * sizes["head_dim"] * DTYPE.itemsize
        return 2 * sizes["num_hidden_layers"] * heads_bytes

    def build(self, device: torch.device) -> PreTrainedModel:
        """Build the model on *device*, which draws the weights: 8 billion of them take a GPU less than a second."""
        torch.manual_seed(0)
        sizes: dict[str, Any] = dict(self.model)
        config = LlamaConfig(
            **sizes,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            initializer_range=self.model["hidden_size"] ** -0.5,  # keeps the size of a layer's input: finite logits
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()

    def tiers(self, pools: Pools, folder: str | None = None) -> dict[str, dict[str, object]]:
        """The tiers' tables of a configuration; no disk without *folder*, no host tier if it has no tokens."""
        tables: dict[str, dict[str, object]] = {
            "device": {"capacity": pools.device * self.token_bytes, "block_size": self.block_size},
            "host": {"capacity": pools.host * self.token_bytes},
        }
        if folder is not None:
            # With this timeout a slow read is a long TTFT here, not a miss.
            tables["disk"] = {"path": folder, "capacity": pools.disk * self.token_bytes, "read_timeout_s": 600.0}
        return tables


SHAPES = {
    "llama-8b": Shape(
        name="llama-8b",
        model={
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
        },
        block_size=32,  # 4 MiB
        documents=Documents(
            lengths=(1 << 10, 4 << 10, 16 << 10, 32 << 10, 64 << 10),
            promised=32 << 10,
            question=128,
            chunk=2048,
            pools=Pools(device=192 << 10, host=320 << 10, disk=320 << 10),  # 24, 40 and 40 GiB
        ),
        decoding=Decoding(
            num_requests=32,
            context=2048,
            steps=32,
            turns=6,
            rounds=6,
            pools=Pools(device=96 << 10, host=96 << 10, disk=0),
        ),
        misses=Misses(
            alone=4096,
            at_once=1024,
            num_at_once=8,
            max_tokens=32,
            rounds=12,
            pools=Pools(device=24 << 10, host=32 << 10, disk=48 << 10),
        ),
    ),
    "tiny": Shape(
        name="tiny",
        model={
            "vocab_size": 1000,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
        },
        block_size=32,  # 8 KiB
        documents=Documents(
            lengths=(256, 1024), promised=1024, question=16, chunk=256, pools=Pools(device=4096, host=8192, disk=65536)
        ),
        decoding=Decoding(
            num_requests=4, context=128, steps=8, turns=3, rounds=2, pools=Pools(device=1024, host=1024, disk=0)
        ),
        misses=Misses(
            alone=256,
            at_once=64,
            num_at_once=4,
            max_tokens=8,
            rounds=4,
            pools=Pools(device=1024, host=2048, disk=65536),
        ),
    ),
}


def tokenizer_of_one_word() -> PreTrainedTokenizerFast:
    """A tokenizer for engines whose prompts are token ids: they require one all the same."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")))


@dataclass
class Prompts:
    """Makes prompts that begin with different tokens: none finds a block, or a part of one, of another."""

    vocab_size: int
    _num_made: int = 0
    _rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def new(self, num_tokens: int) -> list[int]:
        """A new prompt of *num_tokens*."""
        token_ids: list[int] = self._rng.integers(self.vocab_size, size=num_tokens).tolist()
        token_ids[0] = self._num_made % self.vocab_size
        self._num_made += 1
        return token_ids


@contextmanager
def weights_read_once() -> Iterator[None]:
    """Compute the digest of a model's weights once, not for each engine: each would read 16 GB again."""
    with patch.object(runner, "weights_digest", lru_cache(maxsize=1)(weights_digest)):
        yield


def free_memory() -> None:
    """Free the device memory of engines that were closed."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
