"""What does it cost that an answer follows a JSON schema? Per token, against a step; and the first use of a schema."""

import json
import re
import statistics
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.report import Row, arguments, publish
from bench.rounds import Side, alternate, at_most, ready, seconds
from kvtier.engine.model.drawing.draws import sample_tokens
from kvtier.engine.model.drawing.sampler import Sampler
from kvtier.engine.model.paged_model import Chunk, PagedModel
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.model.structured.grammar import Grammar
from kvtier.engine.model.structured.grammars import Grammars
from kvtier.engine.model.structured.structured_outputs import StructuredOutputs

ROWS = (1, 8)
BLOCK_SIZE = 32
MAX_SHARE = 0.05  # of a step
MAX_FIRST_MS = 200.0
LONGEST_TOKEN = 16  # bytes


@dataclass(frozen=True)
class Size:
    """The size of the vocabulary and of the model. As Qwen's vocabulary, and as its models."""

    num_tokens: int = 151_643
    num_logits: int = 152_064
    num_words: int = 60_000  # that the vocabulary is made of
    num_layers: int = 12
    depth: int = 512  # tokens of each request before its step

    @property
    def end(self) -> int:
        """The token that ends an answer."""
        return self.num_logits - 1

    @property
    def blocks_of_request(self) -> int:
        """Blocks of a request at its step."""
        return self.depth // BLOCK_SIZE + 1


QUICK = Size(num_tokens=2_000, num_logits=2_048, num_words=2_000, num_layers=2, depth=64)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "format": "email"},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "city": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "city", "zip"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "kind": {"enum": ["person", "company", "other"]},
        "score": {"type": "number"},
    },
    "required": ["name", "age", "email", "address", "tags", "kind", "score"],
    "additionalProperties": False,
}
ANSWER = {
    "name": "Ada Lovelace",
    "age": 36,
    "email": "ada.lovelace@example.org",
    "address": {"street": "12 St James's Square, Marylebone", "city": "London", "zip": "12345"},
    "tags": ["mathematics", "poetry, of science", "engines"],
    "kind": "person",
    "score": 12.5,
}


def build_tokenizer(size: Size) -> PreTrainedTokenizerFast:
    """A BPE tokenizer of the most frequent beginnings of words, blanks and signs in Python's library.

    Each token is a shorter one and a byte, which is how it is merged.
    """
    words: Counter[bytes] = Counter()
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if len(words) > size.num_words:
            break
        found = re.findall(r" ?[^\W\d_]+|\d{1,3}| ?[^\w\s]+|\s+", file.read_text(errors="ignore"))
        words.update(word.encode()[:LONGEST_TOKEN] for word in found)
    beginnings: Counter[bytes] = Counter()
    for word, num_times in words.items():
        for length in range(1, len(word) + 1):
            beginnings[word[:length]] += num_times
    symbols = _symbols()
    vocabulary, merges = {symbols[value]: value for value in range(256)}, []
    longer = (beginning for beginning, _ in beginnings.most_common() if len(beginning) > 1)
    for token in islice(longer, size.num_tokens - 256):
        text = "".join(symbols[value] for value in token)
        vocabulary[text] = len(vocabulary)
        merges.append((text[:-1], text[-1]))
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _symbols() -> list[str]:
    """The character by which byte-level tokenizers write each byte: itself where it can be seen, else one of 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in visible]
    return [chr(value) if value in visible else chr(256 + others.index(value)) for value in range(256)]


def build_model(size: Size) -> LlamaForCausalLM:
    """A Llama of random weights in the shape of 109 million parameters, with as many logits as the vocabulary wants."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.num_logits,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=size.num_layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def step_of(model: PagedModel, num_rows: int, size: Size) -> Callable[[], torch.Tensor]:
    """A step of so many requests, of one token each."""
    num_blocks = size.blocks_of_request
    tables = [[range(row * num_blocks, (row + 1) * num_blocks)] for row in range(num_rows)]
    for table in tables:
        model.run([Chunk(range(size.depth), 0, table)])
    chunks = [Chunk([5], size.depth, table) for table in tables]
    return lambda: model.run(chunks)


def answer_of(token_ids: Sequence[int], num_rows: int, grammar: Grammar | None, size: Size) -> Callable[[], None]:
    """Draw the whole answer in each row, greedily, from logits that favour it."""
    logits = 3 * torch.randn(num_rows, size.num_logits, generator=torch.Generator().manual_seed(0))

    def draw() -> None:
        samplers = [
            Sampler(SamplingParams(), (), grammar=None if grammar is None else grammar.begin([size.end]))
            for _ in range(num_rows)
        ]
        for token_id in token_ids:
            before = logits[:, token_id].clone()
            logits[:, token_id] = 100.0
            assert sample_tokens(logits, samplers) == [token_id] * num_rows
            logits[:, token_id] = before

    return draw


def rows_of_tokens(
    model: PagedModel, token_ids: Sequence[int], grammar: Grammar, num_rows: int, num_rounds: int, size: Size
) -> list[Row]:
    """What a grammar adds to the drawing of a step's tokens, and which part of the step that is."""
    step = step_of(model, num_rows, size)
    sides = [
        Side("step", ready(step)),
        Side("with", ready(answer_of(token_ids, num_rows, grammar, size))),
        Side("without", ready(answer_of(token_ids, num_rows, None, size))),
    ]
    times = alternate(sides, num_rounds)
    added = [(a - b) / len(token_ids) for a, b in zip(times["with"], times["without"], strict=True)]
    shares = [each / took for each, took in zip(added, times["step"], strict=True)]
    name = f"{num_rows} rows" if num_rows > 1 else "1 row"
    return [
        Row(f"{name}: a step of one token each", 1000 * statistics.median(times["step"]), "ms"),
        Row(f"{name}: drawing without a schema", 1000 * statistics.median(times["without"]) / len(token_ids), "ms"),
        Row(f"{name}: a schema adds, per token and row", 1000 * statistics.median(added) / num_rows, "ms"),
        at_most(f"{name}: a schema adds, of a step", statistics.median(shares), "", MAX_SHARE),
    ]


def rows_of_first_use(grammars: Grammars, num_rounds: int) -> list[Row]:
    """What it takes to compile a schema that is new, and one that was used before."""

    asked = [StructuredOutputs(json={**SCHEMA, "title": f"schema {number}"}) for number in range(num_rounds)]
    first = [seconds(partial(grammars.compile, each)) for each in asked]
    again = [seconds(partial(grammars.compile, each)) for each in asked]
    return [
        at_most("first use of a schema", 1000 * statistics.median(first), "ms", MAX_FIRST_MS),
        Row("  the slowest", 1000 * max(first), "ms"),
        Row("its next use", 1000 * statistics.median(again), "ms"),
    ]


def main() -> None:
    """Time the reading of the vocabulary, new schemas, and steps of 1 and 8 rows."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="of each figure (7)")
    parser.add_argument("--threads", type=int, help="of torch, beside a busy machine 1 (as many as it takes itself)")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    size, num_rounds = options.effort.of(Size(), QUICK), options.rounds or options.effort.of(7, quick=2)
    tokenizer = build_tokenizer(size)
    grammars = Grammars(tokenizer, size.num_logits, frozenset([size.end]))
    rows = [Row(f"reading a vocabulary of {len(tokenizer):,}", 1000 * seconds(grammars.prepare), "ms")]
    rows += rows_of_first_use(grammars, num_rounds)
    grammar = grammars.compile(StructuredOutputs(json=SCHEMA))
    token_ids = tokenizer(json.dumps(ANSWER))["input_ids"]
    num_blocks = max(ROWS) * size.blocks_of_request
    model = PagedModel(build_model(size), BLOCK_SIZE, num_blocks * bytes_of_block(size))
    try:
        for num_rows in ROWS:
            rows += rows_of_tokens(model, token_ids, grammar, num_rows, num_rounds, size)
    finally:
        model.close()
    publish("structured_output", rows, options.json)


def bytes_of_block(size: Size) -> int:
    """Of keys and values of the model: two of each layer, in float32."""
    return BLOCK_SIZE * 2 * size.num_layers * 4 * 64 * 4


if __name__ == "__main__":
    main()
