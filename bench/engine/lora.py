"""What do adapters cost? Compares steps with adapters, unused and used by their requests, to steps without any."""

import copy
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bench.report import Row, arguments, publish
from bench.rounds import at_most
from kvtier.engine.model.lora_adapter import LoraAdapter, load_adapter
from kvtier.engine.model.runner import Chunk, ModelRunner
from kvtier.tiers.naming.block_hash import Lora

BLOCK_SIZE = 32
NUM_REQUESTS = 8
NUM_ADAPTERS = 4
DEPTH = 256  # tokens of each request before those of the step
MAX_BLOCKS = 12  # slots of a request
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, init_lora_weights=False)
CAPACITY = 128 << 20

Step = Callable[[int, int], object]  # runs one: tokens of each chunk, and how many chunks


def build_model(num_layers: int) -> LlamaForCausalLM:
    """A Llama with random weights, 25 M parameters: so small that the costs of a step besides computing show."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config).eval()


def chunks_of(num_tokens: int, num_chunks: int, keys: Sequence[Lora | None]) -> list[Chunk]:
    """One chunk of *num_tokens* for each request, after its first tokens. The requests take *keys* in turn."""
    return [Chunk(range(num_tokens), DEPTH, [tables_of(i)], lora=keys[i % len(keys)]) for i in range(num_chunks)]


def tables_of(request_id: int) -> range:
    """The slots of a request."""
    return range(request_id * MAX_BLOCKS, (request_id + 1) * MAX_BLOCKS)


def begin(runner: ModelRunner) -> ModelRunner:
    """Compute the first tokens of all requests; returns *runner*."""
    for i in range(NUM_REQUESTS):
        runner.run([Chunk(range(DEPTH), 0, [tables_of(i)])])
    return runner


def steps_of(runner: ModelRunner, keys: Sequence[Lora | None]) -> Step:
    """Steps of *runner*, whose requests take *keys* in turn."""
    return lambda num_tokens, num_chunks: runner.run(chunks_of(num_tokens, num_chunks, keys))


class PeftSteps:
    """The baseline: peft's own layers in the model, and a pass for each adapter."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = copy.deepcopy(model)
        for i in range(NUM_ADAPTERS):
            inject_adapter_in_model(SETTINGS, self._model, adapter_name=f"a{i}")
        self._layers = [module for module in self._model.modules() if isinstance(module, BaseTunerLayer)]
        self._runner = begin(ModelRunner(self._model, BLOCK_SIZE, CAPACITY))

    def unused(self, num_tokens: int, num_chunks: int) -> None:
        """Run a step of the base model."""
        for layer in self._layers:
            layer._disable_adapters = True  # what enable_adapters(False) does, without its loops
        self._runner.run(chunks_of(num_tokens, num_chunks, [None]))

    def mixed(self, num_tokens: int, num_chunks: int) -> None:
        """Run a step whose requests use all adapters."""
        chunks = chunks_of(num_tokens, num_chunks, [None])
        for i in range(min(NUM_ADAPTERS, num_chunks)):
            for layer in self._layers:
                layer._disable_adapters = False
                layer.set_adapter(f"a{i}", inference_mode=True)
            self._runner.run(chunks[i::NUM_ADAPTERS])


def adapters_of(model: PreTrainedModel) -> list[LoraAdapter]:
    """Save and load adapters with random weights for *model*."""
    with tempfile.TemporaryDirectory() as folder:
        for i in range(NUM_ADAPTERS):
            get_peft_model(copy.deepcopy(model), SETTINGS).save_pretrained(f"{folder}/a{i}")
        return [load_adapter(model, f"a{i}", Path(folder) / f"a{i}") for i in range(NUM_ADAPTERS)]


def main() -> None:
    """Run each kind of step once a round, in random order; gives medians of the ratios in a round."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="steps of each kind (25)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the threads of small operations wait for each other when a core is busy
    num_layers, num_rounds = options.effort.of(8, quick=1), options.rounds or options.effort.of(25, quick=1)
    model = build_model(num_layers)
    adapters = adapters_of(model)
    keys = [adapter.key for adapter in adapters]
    without = begin(ModelRunner(copy.deepcopy(model), BLOCK_SIZE, CAPACITY))
    having = begin(ModelRunner(model, BLOCK_SIZE, CAPACITY, adapters))
    peft = PeftSteps(model)
    kinds: dict[str, Step] = {
        "without": steps_of(without, [None]),
        "unused": steps_of(having, [None]),
        "one adapter": steps_of(having, keys[:1]),
        f"{NUM_ADAPTERS} adapters": steps_of(having, keys),
        "half base": steps_of(having, [None, keys[0], None, keys[1]]),
        "peft, unused": peft.unused,
        f"peft, {NUM_ADAPTERS} adapters": peft.mixed,
    }
    rows = []
    for title, size in (("decoding, 8 requests", (1, NUM_REQUESTS)), ("prefill, 256 tokens of 4", (64, 4))):
        times = _times(kinds, size, num_rounds)
        median = 1000 * statistics.median(times["without"])
        rows.append(Row(f"{title}: without adapters", median, "ms"))
        for name in list(kinds)[1:]:
            ratios = [mine / base for mine, base in zip(times[name], times["without"], strict=True)]
            ratio = statistics.median(ratios)
            rows.append(at_most(f"  {name}", ratio, "", 1.02) if name == "unused" else Row(f"  {name}", ratio, ""))
    publish("lora", rows, options.json)


def _times(kinds: dict[str, Step], size: tuple[int, int], rounds: int) -> dict[str, list[float]]:
    rng = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for i in range(rounds + 3):
        for name in rng.sample(list(kinds), len(kinds)):
            kinds[name](*size)  # untimed: sets the hooks, or peft's switches, as an engine's step before it does
            began_at = time.perf_counter()
            kinds[name](*size)
            if i >= 3:
                times[name].append(time.perf_counter() - began_at)
    return times


if __name__ == "__main__":
    main()
