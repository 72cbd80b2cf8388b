"""The arguments of `kvtier prove`, and what they may be."""

import argparse
from collections.abc import Callable
from typing import Any

from kvtier.cli.arguments import HelpFormatter, some_text

EXAMPLES = """examples:
  kvtier prove http://127.0.0.1:8000           a server of kvtier, vLLM, SGLang or llama.cpp; its LoRA adapters too
  kvtier prove http://127.0.0.1:8000 --evict 200000      prompts of so many tokens push what is cached to colder tiers
  kvtier prove http://127.0.0.1:8000 --between 'systemctl restart vllm'
  kvtier prove http://127.0.0.1:8000 --other-url http://127.0.0.1:8001   two servers on one cache
  kvtier prove http://127.0.0.1:8000 --lengths 500,20000 --rounds 8    more prompts, and other lengths
  kvtier prove http://127.0.0.1:8000 --json > proof.json

exit status: 0 what came from the cache is right, as far as can be told; 1 wrong answers, or blocks of others, were
found; 2 it could not be told: the server could not be asked, or nothing came from its cache
"""
_MIN_LENGTH = 64  # as proof.py has it, whose imports would make --help slow
_MAX_LENGTH = 10_000_000
_MAX_COUNT = 1_000_000_000


def add_prove(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier prove`, which calls *run*."""
    prove = commands.add_parser(
        "prove",
        help="whether what a server answers from its KV cache is right, for any OpenAI-compatible server",
        description="Asks a running server prompts that share beginnings in known ways, computed as a whole and from"
        " its KV cache, and compares answers and log probabilities beyond what batches and shapes of computation do to"
        " them; it needs nothing but the server's HTTP, and fills the cache with what it asks.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    prove.add_argument("url", type=some_text, metavar="URL", help="the server, with or without /v1")
    prove.add_argument("--model", type=some_text, metavar="NAME", help="the model (default: the first that it lists)")
    prove.add_argument(
        "--adapter",
        action="append",
        type=some_text,
        metavar="NAME",
        help="a LoRA adapter of the model; may be repeated (default: up to four that it lists)",
    )
    prove.add_argument(
        "--other-url",
        type=some_text,
        metavar="URL",
        help="a server that shares the cache and has another model of the same name (default: none)",
    )
    prove.add_argument(
        "--lengths",
        type=_lengths,
        metavar="N,N",
        help=f"of prompts, in tokens, {_MIN_LENGTH} or more (default: those of 200,1000,4000 that the model takes)",
    )
    prove.add_argument(
        "--rounds",
        type=_count,
        default=2,
        metavar="N",
        help="prompts of each kind and length; every other one is asked among others (default: 2)",
    )
    prove.add_argument(
        "--concurrency", type=_count, default=8, metavar="N", help="requests at once, where some are (default: 8)"
    )
    prove.add_argument(
        "--evict",
        type=_count,
        metavar="TOKENS",
        help="before prompts are asked again, ask others of so many tokens in all: as many as the device's memory and"
        " the tiers above the one that is to answer hold (default: none)",
    )
    prove.add_argument(
        "--between",
        type=some_text,
        metavar="COMMAND",
        help="before prompts are asked again, have a shell run this, and wait until the server answers (default: none)",
    )
    prove.add_argument(
        "--seed",
        type=_count,
        metavar="N",
        help="draw the same prompts as another run did with it, for a cache that has been emptied (default: new ones)",
    )
    prove.add_argument(
        "--api-key",
        type=some_text,
        metavar="KEY",
        help="other users can read it here: rather set KVTIER_API_KEY (default: KVTIER_API_KEY)",
    )
    prove.add_argument("--json", action="store_true", help="print one JSON object, with each wrong answer's prompts")
    prove.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; give 1 or more")
    return int(text)


def _lengths(text: str) -> list[int]:
    lengths = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if not all(_MIN_LENGTH <= length <= _MAX_LENGTH for length in lengths):
        raise argparse.ArgumentTypeError(f"{text!r} are no lengths; write them as 200,1000, each {_MIN_LENGTH} or more")
    return sorted(set(lengths))
