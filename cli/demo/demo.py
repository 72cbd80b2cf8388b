"""The steps of `kvtier demo`: questions about one document that is cached on the device, in host memory or on disk."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvtier.cli.demo.document import Document, Fact, document_text, is_right, make_document, question, with_facts
from kvtier.cli.demo.model import build_demo_model
from kvtier.engine.config import Config, as_config
from kvtier.engine.llm import LLM, encode, load_model, torch_device
from kvtier.engine.model.paged_layout import bytes_per_block
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.scheduling.request import Completion
from kvtier.store.lmdb.data_file import max_bytes
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.tiers.lower.name_set import GROUP_BYTES, NAMESPACE_BYTES
from kvtier.tiers.naming.block_hash import BlockChain, HashAlgorithm
from kvtier.tiers.naming.tier import Tier

BLOCK_SIZE = 64  # tokens
DEVICE_DOCUMENTS = 1.25  # capacity of the device pool in documents; a second document evicts the first
HOST_DOCUMENTS = 2.25
DISK_DOCUMENTS = 12
MIN_TOKENS = 1000
MAX_OTHERS = 48  # max number of other documents to prefill to evict the first one from a tier
QUESTIONS = {"cold": 1, "device": 5, "host": 3, "disk": 3, "restart": 3, "corrupt": 3}
MAX_ANSWER_TOKENS = 12
QUESTION_TOKENS = 200  # room for the question, its answer, and the end of the document's last sentence

Note = Callable[[str], None]


class Tokens(msgspec.Struct, frozen=True):
    """The number of tokens of one prompt whose KV was found in each tier, and the number of *recomputed* tokens."""

    device: int
    host: int
    disk: int
    recomputed: int


class Step(msgspec.Struct, frozen=True):
    """A row of the demo's table: the questions that one step asks about the document, and the measurements.

    *name* is the kind of step: in "host", for example, the document's KV is in host memory. *ttft_s* is the TTFT of the
    first question; in the step "device", it is the median of all questions.
    """

    name: str
    ttft_s: float
    tokens: Tokens  # of the first question's prompt
    answers_equal: bool  # each answer is the same as in earlier steps
    answers_correct: int
    questions: int
    answers: dict[str, str]
    corrupt_blocks: int = 0


class DemoSettings(msgspec.Struct, frozen=True):
    """The settings of a demo.

    The last steps run in new processes, which receive the settings as JSON and open the same store.
    """

    model: str | None  # None: the bundled model
    document: str | None  # path of a file; None: a generated document
    num_tokens: int
    store: str
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class Stage:
    """The model, the document and the configuration that the steps of the demo share.

    The device and host tiers are so small that a few other documents evict this one.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    document: Document
    num_tokens: int
    num_words: int  # length of other documents in words; a word is one token of the bundled tokenizer
    config: Config
    asked: tuple[Fact, ...]

    @classmethod
    def of(cls, plan: DemoSettings) -> "Stage":
        """Load or build the model, the document and the configuration that *plan* names."""
        model, tokenizer = _model(plan)
        limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if plan.document is None and limit is not None and plan.num_tokens > limit - QUESTION_TOKENS:
            advice = f"give {limit - QUESTION_TOKENS} or fewer, or another --model"
            limits = f"the model takes at most {limit:,} tokens, question included"
            raise ValueError(f"--tokens {plan.num_tokens}: {limits}; {advice}")
        if plan.document is None:
            document = make_document(0, plan.num_tokens)
        else:
            document = with_facts(document_text(plan.document))
        num_tokens = len(encode(tokenizer, document.text))
        if num_tokens < MIN_TOKENS:
            raise ValueError(f"document: {num_tokens} tokens are too few for the demo; use {MIN_TOKENS} or more")
        blocks = num_tokens // BLOCK_SIZE * bytes_per_block(model, BLOCK_SIZE)
        config = as_config(
            {
                "device": {"capacity": int(DEVICE_DOCUMENTS * blocks), "block_size": BLOCK_SIZE},
                "host": {"capacity": int(HOST_DOCUMENTS * blocks)},
                "disk": {"path": plan.store, "capacity": max_bytes(int(DISK_DOCUMENTS * blocks))},
                # Prefill in small chunks, because a block is lost if it is evicted before it is copied to a lower tier.
                "scheduler": {"prefill_chunk": min(512, num_tokens // BLOCK_SIZE // 8 * BLOCK_SIZE), "load": "always"},
            }
        )
        # Ask first for the facts in the middle, because the last step damages the block with the first of them.
        middle = len(document.facts) // 2
        asked = sorted(document.facts, key=lambda fact: abs(document.facts.index(fact) - middle))
        num_words = num_tokens * plan.num_tokens // len(encode(tokenizer, make_document(1, plan.num_tokens).text))
        return cls(
            model, tokenizer, document, num_tokens, num_words, config, tuple(asked[: max(QUESTIONS.values()) + 1])
        )


def _model(plan: DemoSettings) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if plan.model is not None:
        return load_model(plan.model, as_config({"model": {"device": plan.device}}).model, None)
    model, tokenizer = build_demo_model()
    torch.nn.Module.to(model, torch_device("cpu" if plan.device == "auto" else plan.device))
    return model, tokenizer


class Questioner:
    """A client that asks one engine questions about the demo's document.

    *answers* has the answers of earlier steps, by the name of the fact. New answers are compared with them.
    """

    def __init__(self, stage: Stage, llm: LLM, answers: dict[str, str]) -> None:
        self._stage = stage
        self._llm = llm
        self._answers = answers
        self._num_others = 0

    def step(self, name: str) -> Step:
        """Ask questions about the document as the step *name* (a key of `QUESTIONS`), and return the measurements."""
        facts = self._stage.asked[1:] if name == "device" else self._stage.asked[: QUESTIONS[name]]
        completions = [self._ask(self._stage.document.text, fact) for fact in facts]
        answers = {fact.name: done.text.strip() for fact, done in zip(facts, completions, strict=True)}
        equal = all(self._answers.get(asked, answer) == answer for asked, answer in answers.items())
        self._answers.update(answers)
        first = completions[0]
        times = [done.ttft_s for done in completions]
        tiers = self._llm.statistics().cache.tiers.values()
        return Step(
            name=name,
            ttft_s=statistics.median(times) if name == "device" else first.ttft_s,
            tokens=Tokens(first.tokens.device, first.tokens.host, first.tokens.disk, first.tokens.recomputed),
            answers_equal=equal,
            answers_correct=sum(is_right(answers[fact.name], fact) for fact in facts),
            questions=len(facts),
            answers=answers,
            corrupt_blocks=sum(sum(tier.corrupt.values()) for tier in tiers),
        )

    def push_out_of(self, tiers: Sequence[Tier], note: Note) -> None:
        """Evict the demo's document from *tiers*, by prefilling other documents, each a quarter as long.

        Each document is prefilled only after all copies to lower tiers are done. Otherwise a block might be evicted
        before it is copied, and the demo's next step would not find it.
        """
        for _ in range(MAX_OTHERS):
            where = self._llm.where(self._stage.document.text)
            if not any(where[tier] for tier in tiers):
                return
            self._num_others += 1
            note(f"reading other document {self._num_others} to evict the first one from {' and '.join(tiers)}")
            other = make_document(self._num_others, self._stage.num_words // 4, num_facts=0)
            self._llm.generate(other.text, SamplingParams(max_tokens=1))
            while self._llm.core.cache.num_in_flight:
                self._llm.core.idle()
                time.sleep(0.001)

    def warm_up(self) -> None:
        """Run the model on unrelated tokens, because the first passes of a process are slower than later ones."""
        first = encode(self._stage.tokenizer, self._stage.document.text)[0]
        self._llm.generate(
            [[0 if first else 1] * (2 * BLOCK_SIZE)], SamplingParams(max_tokens=2), skip_reading_prefix_cache=True
        )

    def _ask(self, text: str, fact: Fact) -> Completion:
        sampling = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, stop="\n")
        return self._llm.generate(question(text, fact.name), sampling)[0]


def run_demo(plan: DemoSettings, note: Note) -> list[Step]:
    """Run all steps of the demo. Call *note* with lines that describe the progress."""
    note("building the model" if plan.model is None else f"loading {plan.model}")
    stage = Stage.of(plan)
    answers: dict[str, str] = {}
    steps = []
    with LLM(stage.model, stage.config, stage.tokenizer) as llm:
        asker = Questioner(stage, llm, answers)
        asker.warm_up()
        note(f"reading a document of {stage.num_tokens} tokens for the first time")
        steps.append(asker.step("cold"))
        note("asking more questions about it")
        steps.append(asker.step("device"))
        asker.push_out_of([Tier.DEVICE], note)
        steps.append(asker.step("host"))
        asker.push_out_of([Tier.DEVICE, Tier.HOST], note)
        steps.append(asker.step("disk"))
        note("writing the remaining blocks to disk and stopping the engine")
    note("a new process asks on the same store")
    steps.append(_step_elsewhere(plan, "restart", answers))
    flip_a_byte(stage)
    note("one byte of a stored block is flipped; a new process asks again")
    steps.append(_step_elsewhere(plan, "corrupt", answers))
    return steps


def flip_a_byte(stage: Stage) -> None:
    """Flip one byte of a block on disk, to corrupt it. The block contains the fact that the demo asks for first."""
    token_ids = encode(stage.tokenizer, stage.document.text)
    before = stage.document.text[: stage.document.text.index(f"{stage.asked[0].name} is")]
    block_id = min(len(encode(stage.tokenizer, before)), len(token_ids) - BLOCK_SIZE) // BLOCK_SIZE
    names = stage.config.names
    chain = BlockChain(BLOCK_SIZE, algorithm=HashAlgorithm(names.algorithm), seed=names.seed)
    chain.extend(token_ids)
    assert stage.config.disk is not None, "the demo has a disk"
    with LmdbStore(Path(stage.config.disk.path)) as store:
        keys = [key for key in store.keys() if key[NAMESPACE_BYTES:-GROUP_BYTES] == chain.names[block_id]]  # noqa: SIM118  # no dict
        places = [place for key in keys if (place := store.place(key)) is not None]
    for path, offset, length in places:
        with path.open("r+b") as file:
            file.seek(offset + length // 2)
            (byte,) = file.read(1)
            file.seek(offset + length // 2)
            file.write(bytes([byte ^ 0x10]))


def _step_elsewhere(plan: DemoSettings, name: str, answers: dict[str, str]) -> Step:
    """Run one step in a new process, which opens the same store with empty device and host tiers."""
    order = json.dumps({"plan": msgspec.to_builtins(plan), "name": name, "answers": answers})
    command = [sys.executable, "-m", "kvtier.cli.demo.demo"]
    done = subprocess.run(command, input=order, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"demo: the process of the step {name} failed: {done.stderr.strip().splitlines()[-1]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Step)


def _main() -> None:
    order: dict[str, Any] = json.loads(sys.stdin.read())
    stage = Stage.of(msgspec.convert(order["plan"], DemoSettings))
    with LLM(stage.model, stage.config, stage.tokenizer) as llm:
        asker = Questioner(stage, llm, order["answers"])
        asker.warm_up()
        print(msgspec.json.encode(asker.step(order["name"])).decode())


def usual_length(model: str | None, device: str) -> int:
    """Return the default length of the document in tokens, such that its prefill takes only seconds.

    It is shorter for a real model on a CPU, which prefills only a few hundred tokens per second.
    """
    return 1_000 if model is not None and torch_device(device).type == "cpu" else 10_000


def default_store() -> tempfile.TemporaryDirectory[str]:
    """Return a context manager that creates a temporary folder for the demo's store and deletes it at the end."""
    return tempfile.TemporaryDirectory(prefix="kvtier-demo-")


if __name__ == "__main__":
    _main()
