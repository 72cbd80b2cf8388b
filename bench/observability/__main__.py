"""What does it cost to see where tokens come from, and is what is seen true?

Name questions to have their answers only.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from bench.observability.balance import balance_rows
from bench.observability.cardinality import cardinality_rows
from bench.observability.cost import cost_rows
from bench.observability.explain import explain_rows
from bench.observability.page import page_rows
from bench.observability.remembering import remembering_rows
from bench.questions import answers, parsed
from bench.report import Effort, Row, arguments, publish

QUESTIONS: Mapping[str, Callable[[Effort, Path], list[Row]]] = {
    "cardinality": cardinality_rows,
    "balance": balance_rows,
    "explain": explain_rows,
    "remembering": remembering_rows,
    "page": page_rows,
    "cost": cost_rows,
}


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__ or "")
    options = parsed(parser, QUESTIONS)
    publish("observability", answers(options, QUESTIONS), options.json)


if __name__ == "__main__":
    main()
