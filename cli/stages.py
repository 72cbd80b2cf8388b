"""Lines on stderr that say what a command is doing, also if stderr is not a terminal.

The first line appears before slow imports. Servers write such lines to their log instead, because the log may be JSON.
"""

import sys

IMPORTING = "loading torch and transformers"


def show_stage(stage: str) -> None:
    """Print *stage*, such as "loading torch", as a line on stderr."""
    print(f"kvtier: {stage}", file=sys.stderr, flush=True)
