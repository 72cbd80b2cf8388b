"""The options that all examples share, and how they print where a prompt's tokens came from.

kvtier serve --model smollm2 --config laptop
"""

import argparse
from collections.abc import Mapping
from typing import Any


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that name the server and the model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", metavar="URL", help="(%(default)s)")
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="what the server calls it (%(default)s)")
    parser.add_argument(
        "--api-key", default="none", metavar="KEY", help="an API key, if the server asks for one (%(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="length of an answer at most (%(default)s)"
    )
    return parser


def origin(kvtier: Mapping[str, Any]) -> str:
    """The field `kvtier` of an answer in words: where the prompt's tokens came from, and when the first one came."""
    tokens = [f"{count:,} {tier}" for tier, count in kvtier["tokens"].items() if count]
    return f"[{', '.join(tokens)}; first token after {kvtier['ttft_s']:.2f} s]"
