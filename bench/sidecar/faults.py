"""What becomes of the real vLLM when its sidecar is killed or stopped: while idle, before a lookup, and before each
answer of a load and of a store; with both load failure policies?"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from foreign.frame_proxy import FrameProxy
from foreign.running import EngineEnded, Vllm, make_model

from bench.report import Effort, Row
from bench.rounds import at_most
from bench.sidecar.vllm_bed import PROMPT_TOKENS, Bed, started_sidecar

NOTICED_S = 7.0  # three heartbeats: after that an idle engine knows that its sidecar is gone
MOMENTS: Mapping[str, int | None] = {
    "while idle": None,
    "before a lookup": 8,
    "before the lookup's result": 9,
    "before the answer to prepare_retrieve": 18,
    "before the answer to commit_retrieve": 19,
    "before the answer to prepare_store": 16,
    "before the answer to commit_store": 17,
}
STORES, LOADS = (16, 17), (18, 19)
SOME = ("while idle", "before the answer to commit_store")


@dataclass(frozen=True)
class Fault:
    """What is done to the sidecar, when, and with which policy of the engine."""

    deed: str
    moment: str
    policy: str

    @property
    def name(self) -> str:
        """The beginning of its rows' names."""
        return f"sidecar {self.deed} {self.moment}, policy {self.policy}"


@dataclass(frozen=True)
class Documented:
    """What docs/how-to/vllm-lmcache.md says of one moment, with `mq_timeout` 5 and `heartbeat_interval` 2."""

    max_s: float  # that the request takes, a prompt's computation included
    lives: bool = True  # the engine, whatever the policy; else LMCache's client or vLLM may end it


@dataclass
class Outcome:
    """What became of the request that met the fault, and of the engine."""

    is_equal: bool | None = None  # its tokens to those of an engine without a connector; None: there are none
    num_computed: int | None = None
    took_s: float = 0.0
    ended: str = ""  # the engine, with what
    where: str = ""
    lives: bool = True  # and answers another request as it should
    attaches_again: bool | None = None


class FaultBed:
    """An engine, a sidecar with a proxy before it, and an engine without a connector that says what is right."""

    def __init__(self, python: str, model: Path, folder: Path, policy: str, control: Vllm, stack: ExitStack) -> None:
        sidecar = started_sidecar(folder)
        stack.callback(sidecar.kill)  # also if no engine starts
        self._proxy = stack.enter_context(FrameProxy(sidecar.endpoint))
        self._control = control
        self.bed = Bed(python, model, sidecar, self._proxy.endpoint, policy)
        stack.callback(self.bed.close)

    def meet(self, fault: Fault) -> Outcome:
        """Have the engine meet the fault, then have all of it well again."""
        sidecar, operation = self.bed.sidecar, MOMENTS[fault.moment]
        deed = sidecar.kill if fault.deed == "killed" else sidecar.pause
        prompt, other = self.bed.prompt(), self.bed.prompt()
        if operation not in STORES:
            self.bed.engine.generate([prompt])
            self.bed.engine.reset()
        outcome = Outcome()
        if operation is None:
            deed()
            time.sleep(NOTICED_S)
        else:
            self._proxy.arm(operation, deed)
        began_at = time.monotonic()
        try:
            answer = self.bed.engine.generate([prompt])
            outcome.took_s = time.monotonic() - began_at
            if answer["tokens"] != [[]]:
                outcome.is_equal = answer["tokens"] == self._right(prompt)
            outcome.num_computed = answer["scheduled"]
            outcome.lives = self.bed.engine.generate([other])["tokens"] == self._right(other)
        except EngineEnded as error:
            outcome.took_s = outcome.took_s or time.monotonic() - began_at
            outcome.ended, outcome.where, outcome.lives = str(error), error.where, False
        if operation is not None and not self._proxy.has_tripped.is_set():
            raise RuntimeError(f"{fault.name}: no such request came")
        self._make_well(fault, outcome)
        return outcome

    def _make_well(self, fault: Fault, outcome: Outcome) -> None:
        if fault.deed == "killed":
            self.bed.sidecar.start()
        else:
            self.bed.sidecar.go_on()
        if not outcome.lives:
            self.bed.restart_engine()
            return
        try:
            self.bed.wait_attached()
            outcome.attaches_again = True
        except (EngineEnded, TimeoutError) as error:
            outcome.attaches_again = False
            outcome.ended = outcome.ended or f"attaching again: {error}"
            self.bed.restart_engine()

    def _right(self, prompt: list[int]) -> Any:
        tokens = self._control.generate([prompt])["tokens"]
        self._control.reset()
        return tokens


def documented(fault: Fault) -> Documented:
    """See there. A lookup is waited for until a heartbeat is late, then the beginning of a store is, unless the
    worker's own heartbeat was late before; what is due at a load is waited for once or twice."""
    operation = MOMENTS[fault.moment]
    if operation is None:
        return Documented(max_s=1.0)
    if operation in LOADS:
        return Documented(max_s=12.0 if operation == 18 else 7.0, lives=fault.policy == "recompute")
    if operation in STORES:
        return Documented(max_s=7.0, lives=operation == 17)
    return Documented(max_s=12.0, lives=False)


def rows_of(fault: Fault, outcome: Outcome) -> Iterator[Row]:
    """What was seen beside what is documented."""
    known, name = documented(fault), fault.name
    if outcome.is_equal is not None:
        is_whole = outcome.num_computed == PROMPT_TOKENS
        yield Row(f"{name}: outputs equal", outcome.is_equal, "", "1", outcome.is_equal)
        yield Row(f"{name}: tokens computed", outcome.num_computed or 0, "tokens", f"{PROMPT_TOKENS}", is_whole)
    yield at_most(f"{name}: took", outcome.took_s, "s", known.max_s)
    target, ok = ("1", outcome.lives) if known.lives else ("may end: see docs", None)
    yield Row(f"{name}: the engine lives", outcome.lives, "", target, ok)
    if outcome.attaches_again is not None:
        yield Row(f"{name}: attaches again", outcome.attaches_again, "", "1", outcome.attaches_again)


def fault_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """Every fault at every moment with both policies; in a quick run a few moments with one policy.

    Where an engine ends is said on standard error.
    """
    rows: list[Row] = []
    model = make_model(python, folder)
    with Vllm(python, model, {}) as control:
        for policy in effort.of(("recompute", "fail"), quick=("recompute",)):
            with ExitStack() as stack:
                bed = FaultBed(python, model, folder / f"store-{policy}", policy, control, stack)
                for deed, moment in product(
                    effort.of(("killed", "stopped"), quick=("killed",)), effort.of(tuple(MOMENTS), SOME)
                ):
                    fault = Fault(deed, moment, policy)
                    outcome = bed.meet(fault)
                    if outcome.ended:
                        print(f"{fault.name}: {outcome.ended} ({outcome.where})", file=sys.stderr)
                    rows += rows_of(fault, outcome)
    return rows
