"""The arguments of `kvtier prove` and their validation."""

import argparse
from collections.abc import Callable
from typing import Any

from kvtier.cli.arguments import HelpFormatter, nonempty_text

EXAMPLES = """examples:
  kvtier prove http://127.0.0.1:8000           a kvtier, vLLM, SGLang or llama.cpp server, with its LoRA adapters
  kvtier prove http://127.0.0.1:8000 --evict 200000      other prompts of 200,000 tokens evict cached blocks first
  kvtier prove http://127.0.0.1:8000 --between 'systemctl restart vllm'
  kvtier prove http://127.0.0.1:8000 --other-url http://127.0.0.1:8001   two servers that share a cache
  kvtier prove http://127.0.0.1:8000 --lengths 500,20000 --rounds 8    more prompts, and other lengths
  kvtier prove http://127.0.0.1:8000 --json > proof.json

exit status: 0 answers from the cache are correct, as far as this test can tell; 1 wrong answers, or blocks of another
model or salt, were found; 2 unknown: the server could not be asked, or nothing came from its cache
"""
_MIN_LENGTH = 64  # same as in proof.py, which is not imported because that would make --help slow
_MAX_LENGTH = 10_000_000
_MAX_COUNT = 1_000_000_000


def add_prove(commands: "argparse._SubParsersAction[Any]", run: Callable[[argparse.Namespace], int]) -> None:
    """Add `kvtier prove`, which calls *run*."""
    prove = commands.add_parser(
        "prove",
        help="test whether an OpenAI-compatible server answers correctly from its KV cache",
        description="Sends prompts that share prefixes to a running server, with and without use of its KV cache. "
        "Compares the answers and log probabilities, and allows for the noise of batching and computation shapes. The "
        "command needs only HTTP. It fills the server's cache with its prompts.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    prove.add_argument("url", type=nonempty_text, metavar="URL", help="URL of the server, with or without /v1")
    prove.add_argument(
        "--model", type=nonempty_text, metavar="NAME", help="the model (default: the first in /v1/models)"
    )
    prove.add_argument(
        "--adapter",
        action="append",
        type=nonempty_text,
        metavar="NAME",
        help="a LoRA adapter of the model; may be repeated (default: up to four that the server lists)",
    )
    prove.add_argument(
        "--other-url",
        type=nonempty_text,
        metavar="URL",
        help="URL of a second server that shares the cache, and has a different model under the same name "
        "(default: none)",
    )
    prove.add_argument(
        "--lengths",
        type=_lengths,
        metavar="N,N",
        help=f"prompt lengths in tokens, {_MIN_LENGTH} or more (default: those of 200,1000,4000 that fit the model)",
    )
    prove.add_argument(
        "--rounds",
        type=_count,
        default=2,
        metavar="N",
        help="number of rounds. A round has one pair of prompts of each kind and length. Every second round is sent "
        "concurrently (default: 2)",
    )
    prove.add_argument(
        "--concurrency", type=_count, default=8, metavar="N", help="maximum number of concurrent requests (default: 8)"
    )
    prove.add_argument(
        "--evict",
        type=_count,
        metavar="TOKENS",
        help="send other prompts of this many tokens in total, to evict cached blocks. This happens between the first "
        "and the second prompts of pairs with shared prefixes. To test a tier, give the total capacity of the faster "
        "tiers, including device memory (default: none)",
    )
    prove.add_argument(
        "--between",
        type=nonempty_text,
        metavar="COMMAND",
        help="shell command to run between the first and the second prompts of pairs with shared prefixes, for "
        "example to restart the server. The test continues when the server answers (default: none)",
    )
    prove.add_argument(
        "--seed",
        type=_count,
        metavar="N",
        help="seed of the random prompts, to repeat those of an earlier run; empty the cache first (default: new ones)",
    )
    prove.add_argument(
        "--api-key",
        type=nonempty_text,
        metavar="KEY",
        help="the API key; other users can read arguments, so prefer KVTIER_API_KEY (default: KVTIER_API_KEY)",
    )
    prove.add_argument("--json", action="store_true", help="print one JSON object, with the prompts of wrong answers")
    prove.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid number; give 1 or more")
    return int(text)


def _lengths(text: str) -> list[int]:
    lengths = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if not all(_MIN_LENGTH <= length <= _MAX_LENGTH for length in lengths):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of lengths; write it as 200,1000, each {_MIN_LENGTH} or more"
        )
    return sorted(set(lengths))
