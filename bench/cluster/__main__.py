"""What is a tier that machines share good for, and what does it cost when it fails?

Real servers of redis, alone and as a cluster of six, on loopback; machines are processes that share nothing else. Name
questions to have their answers only.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from bench.cluster.away import away_rows
from bench.cluster.engines import engine_rows
from bench.questions import answers, parsed
from bench.report import Row, arguments, publish

QUESTIONS: Mapping[str, Callable[[Path], list[Row]]] = {
    "engines": engine_rows,
    "away": away_rows,
}


def main() -> None:
    """Measure, and print."""
    options = parsed(arguments(__doc__ or ""), QUESTIONS)
    publish("cluster", answers(options, QUESTIONS), options.json)


if __name__ == "__main__":
    main()
