"""Trial of a grammar in a subprocess, so that a costly grammar cannot harm the server.

The subprocess compiles the grammar and generates random tokens that the grammar allows. llguidance limits most costs of
a grammar, but not all. A schema of 16 KB took more than a minute to compile, and another one took 2 GB. A chain of
5,000 rules overflowed the stack, which ends the process.
"""

import json
import os
import random
import re
import resource
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.engine.model.sampling import InvalidParameter
from kvtier.engine.model.structured.notation import limits, notation
from kvtier.engine.model.structured.structured_outputs import StructuredOutputs

if TYPE_CHECKING:  # an optional package
    from llguidance import LLMatcher

MAX_CPU_S = 1
MAX_MEMORY_BYTES = 512 << 20
MAX_STEP_S = 0.01
DEADLINE_S = 20.0  # for a trial, which takes 0.1 s on an idle machine
STACK_BYTES = 1 << 20  # half the stack of the threads that use grammars
NUM_STEPS = 256
MAX_TOLD = 300  # characters of an error message
MAX_LEFT_OUT = 100  # keywords that are named as not enforced
_END_MARK = 256
_SPECIAL = re.compile(r"<\[(\d+)\]>")  # a special token, which grammars name by its id


@dataclass(frozen=True, slots=True)
class TrialResult:
    """A grammar that has passed its trial: its text for llguidance, and the memory that it took."""

    notation: str
    num_bytes: int
    left_out: tuple[str, ...]  # keywords of schemas that are not enforced


def run_trial(asked: StructuredOutputs) -> TrialResult:
    """Compile the constraint *asked* in a subprocess, and try it with a few hundred random tokens. Takes 0.1 s.

    Raises:
        InvalidParameter: If *asked* is not valid, cannot be enforced, or takes too much time or memory.
    """
    question = json.dumps([asked.kind, getattr(asked, asked.kind), asked.strict, asked.parameter_name])
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=question,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            start_new_session=True,  # so that Ctrl-C in a terminal does not reach the subprocess
            env={**os.environ, "RUST_BACKTRACE": "0"},
        )
    except subprocess.TimeoutExpired:
        raise InvalidParameter(asked.parameter_name, f"was not compiled in {DEADLINE_S:g} s; try again later") from None
    if done.returncode or not done.stdout:
        raise InvalidParameter(asked.parameter_name, "takes too much time or memory to compile; make it smaller")
    answer = json.loads(done.stdout)
    if (error := answer.get("error")) is not None:
        raise InvalidParameter(asked.parameter_name, error)
    return TrialResult(answer["notation"], answer["num_bytes"], tuple(answer["left_out"]))


class _Bytes:
    """A tokenizer for llguidance with a token for each byte, an end token, and *num_special* special tokens."""

    eos_token_id = _END_MARK
    bos_token_id = None

    def __init__(self, num_special: int) -> None:
        special = [f"<special {number}>".encode() for number in range(num_special)]
        self.tokens = [*(bytes([value]) for value in range(256)), b"", *special]
        self.special_token_ids = list(range(_END_MARK, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _outcome(asked: StructuredOutputs) -> dict[str, object]:
    """Return the subprocess's reply: the compiled grammar, or the error."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found = notation(asked)
    except InvalidParameter as wrong:
        return {"error": _one_line(wrong.what)}
    tried, num_special = _with_own_ids(found.text)
    start = LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes(num_special))), tried, log_level=0, limits=limits())
    if start.is_error():
        return {"error": _one_line(f"cannot be used: {start.get_error()}")}
    if (error := _error_of_steps(start, num_special)) is not None:
        return {"error": error}
    num_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {"notation": found.text, "num_bytes": num_bytes, "left_out": list(found.left_out)[:MAX_LEFT_OUT]}


def _with_own_ids(text: str) -> tuple[str, int]:
    """Renumber a grammar's special tokens for the tokenizer `_Bytes`. Return the grammar and their number."""
    ids = {given: _END_MARK + 1 + number for number, given in enumerate(dict.fromkeys(_SPECIAL.findall(text)))}
    return _SPECIAL.sub(lambda given: f"<[{ids[given[1]]}]>", text), len(ids)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_TOLD else line[:MAX_TOLD] + " …"


def _error_of_steps(start: "LLMatcher", num_special: int) -> str | None:
    """Generate random texts by the grammar, and return an error message if that fails, otherwise None.

    It fails if the grammar allows no text, or if a token takes too long.
    """
    rng, matcher = random.Random(0), start.deep_copy()
    is_first = True
    for _ in range(NUM_STEPS):
        began_at = time.thread_time()
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(_END_MARK + 1 + num_special) if i != _END_MARK and mask[i >> 3] >> (i & 7) & 1]
        if not matcher.is_error() and allowed:
            matcher.consume_token(rng.choice(allowed))
        elif is_first:
            return "allows no text at all"
        if matcher.is_error() or time.thread_time() - began_at > MAX_STEP_S:
            return "takes too long to compute one token; make it simpler"
        is_first = False
        if matcher.is_stopped() or not allowed:
            matcher = start.deep_copy()
    return None


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kind, given, strict, parameter_name = json.load(sys.stdin)
    asked = StructuredOutputs(**{kind: given}, strict=strict, parameter_name=parameter_name)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: print(json.dumps(_outcome(asked))))
    thread.start()
    thread.join()


if __name__ == "__main__":
    _main()
