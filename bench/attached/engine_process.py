"""An engine in a process of its own, which asks questions of made documents: `python -m bench.attached.engine_process`.

It reads its configuration as one line of JSON, then one question after the other, and answers each with a line.
"""

import json
import subprocess
import sys
import time
from typing import Any

from kvtier.cli.demo.document import is_right, make_document, question
from kvtier.cli.demo.model import build_demo_model
from kvtier.engine.llm import LLM
from kvtier.engine.model.sampling import SamplingParams

SAMPLING = SamplingParams(max_tokens=12, stop="\n")
ENDS_WITHIN_S = 60.0


class ModelClient:
    """Asks questions about documents of one engine."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def ask(self, seed: int, num_tokens: int, fact: int = 0) -> dict[str, Any]:
        """Ask for a fact of a document; what came of it, and where the prompt's tokens were."""
        document = make_document(seed, num_tokens)
        asked = document.facts[fact]
        began_at = time.perf_counter()
        done = self.llm.generate(question(document.text, asked.name), SAMPLING)[0]
        tokens = done.tokens
        return {
            "text": done.text,
            "is_right": is_right(done.text.strip(), asked),
            "ttft_s": done.ttft_s,
            "took_s": time.perf_counter() - began_at,
            "num_tokens": tokens.num_tokens,
            "device": tokens.device,
            "host": tokens.host,
            "disk": tokens.disk,
            "recomputed": tokens.recomputed,
            "reasons": {str(reason): num for reason, num in tokens.reasons.items()},
        }

    def settle(self) -> dict[str, Any]:
        """Go on until no copy is under way: what was computed is below."""
        core = self.llm.core
        give_up_at = time.monotonic() + ENDS_WITHIN_S
        num_quiet = 0
        while num_quiet < 20 and time.monotonic() < give_up_at:
            core.idle()
            num_quiet = 0 if core.cache.num_in_flight else num_quiet + 1
            time.sleep(0.005)
        return {}


class EngineProcess:
    """The process, and its questions and answers."""

    def __init__(self, config: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "bench.attached.engine_process"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.send(config)
        self.receive()

    def send(self, what: dict[str, Any]) -> None:
        """Say something; `receive` has the answer."""
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)

    def receive(self) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine has ended with status {self.process.wait(ENDS_WITHIN_S)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, seed: int, num_tokens: int, fact: int = 0) -> dict[str, Any]:
        """See `Asker.ask`."""
        self.send({"ask": [seed, num_tokens, fact]})
        return self.receive()

    def settle(self) -> None:
        """See `Asker.settle`."""
        self.send({"settle": []})
        self.receive()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(ENDS_WITHIN_S)


def main() -> None:
    """Serve one engine."""
    import torch

    config = json.loads(sys.stdin.readline())
    torch.set_num_threads(config.pop("threads", 2))
    model, tokenizer = build_demo_model()
    with LLM(model, config, tokenizer) as llm:
        asker = ModelClient(llm)
        print(json.dumps({}), flush=True)
        for line in sys.stdin:
            ((verb, arguments),) = json.loads(line).items()
            print(json.dumps(getattr(asker, verb)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
