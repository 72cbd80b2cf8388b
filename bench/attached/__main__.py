"""What does kvtier's own engine pay and get, attached to a sidecar, and what becomes of either when the other dies?

All of it takes some six minutes; name questions to have their answers only.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from bench.attached.crowd import crowd_rows
from bench.attached.foul_clients import foul_client_rows
from bench.attached.kills import engine_kill_rows, sidecar_kill_rows
from bench.attached.lookup import lookup_rows
from bench.attached.reuse import reuse_rows
from bench.questions import answers, parsed
from bench.report import Effort, Row, arguments, publish

QUESTIONS: Mapping[str, Callable[[Effort, Path], list[Row]]] = {
    "lookup": lookup_rows,
    "reuse": reuse_rows,
    "crowd": crowd_rows,
    "foul_clients": foul_client_rows,
    "engine_kills": engine_kill_rows,
    "sidecar_kills": sidecar_kill_rows,
}


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__ or "")
    options = parsed(parser, QUESTIONS)
    publish("attached", answers(options, QUESTIONS), options.json)


if __name__ == "__main__":
    main()
