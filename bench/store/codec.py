"""How far, and how fast, does `zstd-plane-2` shrink bfloat16: noise, and keys and values of the demo model?"""

import statistics

import numpy as np
import numpy.typing as npt
import torch

from bench.report import Row
from bench.rounds import KIB, gb_per_s, seconds
from kvtier.cli.demo.document import make_document
from kvtier.cli.demo.model import build_demo_model
from kvtier.store.codec.codec import CODECS

CODEC = "zstd-plane-2"
BLOCK_BYTES = 256 * KIB
NUM_BLOCKS = 16
DOCUMENT_TOKENS = 4000


def codec(num_rounds: int) -> list[Row]:
    """Measure the codec on blocks one after another, as the store encodes and decodes them."""
    torch.manual_seed(0)
    noise = torch.randn(NUM_BLOCKS * BLOCK_BYTES // 2).bfloat16()
    return _rows("normal noise", _blocks(noise), num_rounds) + _rows("K/V of the demo model", _demo_kv(), num_rounds)


def _rows(what: str, blocks: npt.NDArray[np.uint8], num_rounds: int) -> list[Row]:
    coding = CODECS[CODEC]
    payloads = [coding.encode(block.data) for block in blocks]
    outs = np.zeros_like(blocks)

    def encode() -> None:
        for block in blocks:
            coding.encode(block.data)

    def decode() -> None:
        for payload, out in zip(payloads, outs, strict=True):
            coding.decode(payload, out.data)

    times = [(seconds(encode), seconds(decode)) for _ in range(num_rounds + 1)][1:]
    assert np.array_equal(outs, blocks), "the codec is not lossless"
    encoded, decoded = zip(*times, strict=True)
    name = f"codec, {CODEC}, {what}"
    return [
        Row(f"{name}: raw / stored", blocks.nbytes / sum(payload.nbytes for payload in payloads), ""),
        Row(f"{name}: encoding", 1000 * gb_per_s(blocks.nbytes, encoded), "MB/s"),
        Row(f"{name}: decoding", 1000 * gb_per_s(blocks.nbytes, decoded), "MB/s"),
        Row(f"{name}: median block", statistics.median(payload.nbytes for payload in payloads) / KIB, "KiB"),
    ]


def _demo_kv() -> npt.NDArray[np.uint8]:
    """Keys and values of a document in bfloat16. The model is constructed; those of trained ones shrink 1.45 times."""
    model, tokenizer = build_demo_model()
    ids = tokenizer(make_document(seed=0, num_tokens=DOCUMENT_TOKENS).text, return_tensors="pt").input_ids
    with torch.inference_mode():
        cache = model(ids, use_cache=True).past_key_values
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]  # [2, heads, tokens, head_dim]
    tokens_first = torch.stack(layers).permute(3, 0, 1, 2, 4)  # as a block is: [tokens, layers, 2, heads, head_dim]
    return _blocks(tokens_first.bfloat16().flatten())


def _blocks(elements: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The full blocks of *elements*: [num_blocks, block_bytes]."""
    flat = elements.contiguous().view(torch.uint8).numpy()
    return flat[: flat.size // BLOCK_BYTES * BLOCK_BYTES].reshape(-1, BLOCK_BYTES)[:NUM_BLOCKS]
