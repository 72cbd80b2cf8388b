"""What becomes of vLLM on our connector when its sidecar is killed or stopped at each point of a load and of a store,
with both load failure policies?"""

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from foreign.running import EngineEnded, Vllm, make_model
from foreign.socket_proxy import SocketProxy

from bench.connectors.connector_bed import Prompts, started_sidecar, started_vllm
from bench.report import Effort, Row
from bench.rounds import at_most, never

PROMPT_TOKENS = 2050
DEADLINE_S = 0.3  # the connector's default
WELL_S = 60.0  # within which an engine attaches again, and has hits
LOADS: Mapping[str, str | None] = {
    "while idle": None,
    "before it is asked for blocks": "before Fetch",
    "before it answers that": "before Fetched",
    "after it has answered": "after Fetched",
    "before it is told of their use": "before Refresh",
    "before their leases end": "before Release",
}
STORES: Mapping[str, str | None] = {
    "before it is asked for slots": "before Reserve",
    "before it answers that": "before Reserved",
    "after it has answered": "after Reserved",
    "before blocks are published": "before Publish",
    "after blocks are published": "after Publish",
    "before it tells of them": "before InHost",
}


SOME = ("while idle", "before it is asked for blocks", "after it has answered", "after blocks are published")


@dataclass
class Outcome:
    """What became of a request that met a fault, and of its engine."""

    name: str
    is_equal: bool = False
    waited_s: float = 0.0
    hooks_s: float = 0.0  # of one step, at most
    ended: str = ""
    is_well: bool = False  # it attached again by itself, and had hits


class FaultBed:
    """An engine, a sidecar with a proxy before it, and an engine without a connector that says what is right."""

    def __init__(self, python: str, model: Path, folder: Path, policy: str, control: Vllm, prompts: Prompts) -> None:
        self._start = lambda: started_vllm(python, model, str(folder / "proxy.sock"), policy)
        self._policy = policy
        self._control = control
        self._prompts = prompts
        self.sidecar, socket = started_sidecar(folder)
        self.proxy = SocketProxy(socket, str(folder / "proxy.sock"))
        self.engine = self._start()

    def close(self) -> None:
        """End all of it at once."""
        self.engine.kill()
        self.proxy.close()
        self.sidecar.kill()

    def meet(self, deed: str, what: str, moment: str, at: str | None) -> Outcome:
        """Have the engine meet the fault, then have all of it well again."""
        outcome = Outcome(f"{deed} in a {what} {moment}, policy {self._policy}")
        prompt, other = self._prompts.next(), self._prompts.next()
        self.engine.generate([self._prompts.next()])  # slots lie ready
        if what == "load":
            self.engine.generate([prompt])
            self.engine.reset()
        else:
            time.sleep(1.0)  # they have gone back
        do = self._kill if deed == "killed" else self._pause
        if at is None:
            do()
        else:
            self.proxy.arm(at, do)
        try:
            answer = self.engine.generate([prompt], 16)
            if at is not None and not self.proxy.has_tripped.wait(5):
                raise RuntimeError(f"{outcome.name}: no such frame came")
            next_one = self.engine.generate([other])
            outcome.is_equal = answer["tokens"] == self._right(prompt, 16) and next_one["tokens"] == self._right(other)
            outcome.waited_s = max(answer["waited_s"], next_one["waited_s"])
            outcome.hooks_s = max(answer["slowest_hooks_s"], next_one["slowest_hooks_s"])
        except EngineEnded as error:
            outcome.ended = str(error)
        self._make_well(deed)
        outcome.is_well = not outcome.ended and self._has_hits()
        if outcome.ended:
            self.engine = self._start()
        return outcome

    def _kill(self) -> None:
        self.sidecar.kill()

    def _pause(self) -> None:
        self.sidecar.pause()
        self.proxy.hold()

    def _make_well(self, deed: str) -> None:
        if deed == "killed":
            self.sidecar.start()
        else:
            self.sidecar.go_on()
            self.proxy.go_on()

    def _has_hits(self) -> bool:
        give_up_at = time.monotonic() + WELL_S
        while time.monotonic() < give_up_at:
            probe = self._prompts.next()
            self.engine.generate([probe])
            self.engine.reset()
            if self.engine.generate([probe])["cached"] != [0]:
                return True
            time.sleep(0.2)
        return False

    def _right(self, prompt: list[int], num_tokens: int = 8) -> object:
        tokens = self._control.generate([prompt], num_tokens)["tokens"]
        self._control.reset()
        return tokens


def outcomes(effort: Effort, python: str, folder: Path) -> Iterator[Outcome]:
    """Yield every fault at every moment with both policies; in a quick run one at some moments with one policy."""
    model, prompts = make_model(python, folder), Prompts(PROMPT_TOKENS)
    with started_vllm(python, model, None) as control:
        for policy in effort.of(("recompute", "fail"), quick=("fail",)):
            place = folder / policy
            place.mkdir()
            bed = FaultBed(python, model, place, policy, control, prompts)
            try:
                for deed, (what, moments) in product(
                    effort.of(("killed", "stopped"), quick=("killed",)), (("load", LOADS), ("store", STORES))
                ):
                    for moment, at in moments.items():
                        if moment not in effort.of(moments, quick=SOME):
                            continue
                        outcome = bed.meet(deed, what, moment, at)
                        print(outcome, file=sys.stderr)
                        yield outcome
            finally:
                bed.close()


def fault_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """A row for each fault: how long its request waited; then what became of all of them."""
    seen = list(outcomes(effort, python, folder))
    rows = [at_most(f"{each.name}: waited", 1e3 * each.waited_s, "ms", 1e3 * DEADLINE_S + 100) for each in seen]
    slowest = max(each.hooks_s for each in seen)
    num_ended = sum(bool(each.ended) for each in seen)
    num_wrong = sum(not each.is_equal and not each.ended for each in seen)
    num_ill = sum(not each.is_well for each in seen)
    return [
        *rows,
        at_most("the connector's part of a step, at most", 1e3 * slowest, "ms", 1e3 * DEADLINE_S + 100),
        never("engines that ended", num_ended),
        never("wrong tokens", num_wrong),
        never("engines that did not attach again", num_ill),
    ]
