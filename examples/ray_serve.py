"""Runs kvtier as an application of Ray Serve on this machine; the number of replicas follows the load.

    python examples/ray_serve.py --model smollm2 --max-replicas 2
    python examples/ask_document.py report.pdf "Who wrote it?"

It needs `pip install '.[ray]'`, and ends with Ctrl-C. configs/ray/serve.yaml is the same for a cluster.
"""

import server  # noqa: F401  # first: errors of the imports below are one line, too

# isort: split
import argparse

import ray
from ray import serve

from kvtier.routing.ray_serve.app import build_app


def main() -> None:
    """Deploy the application, and wait."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, a GGUF file, or a hub id")
    parser.add_argument("--max-replicas", type=int, default=2, help="maximum number of replicas (default: 2)")
    parser.add_argument("--device", default="1GiB", help="KV memory of each replica (default: 1GiB)")
    parser.add_argument("--host", default="4GiB", help="host memory of the node's sidecar (default: 4GiB)")
    parser.add_argument("--disk", metavar="PATH", help="a folder for the node's sidecar (default: no disk)")
    parser.add_argument("--port", type=int, default=8000, help="HTTP port on this machine (default: 8000)")
    options = parser.parse_args()
    if options.max_replicas < 1:
        parser.error("--max-replicas: give 1 replica or more")

    sidecar: dict[str, object] = {"host": {"capacity": options.host}}
    if options.disk is not None:
        sidecar["disk"] = {"path": options.disk, "capacity": "64GiB"}
    autoscaling = {"min_replicas": 1, "max_replicas": options.max_replicas, "target_ongoing_requests": 4}
    args = {
        "model": options.model,
        "engine": {"device": {"capacity": options.device}},
        "sidecar": sidecar,
        "replicas": {"autoscaling_config": autoscaling, "ray_actor_options": {"num_cpus": 1}},
        "fronts": {"ray_actor_options": {"num_cpus": 0}},
    }
    try:
        app = build_app(args)
    except ValueError as error:
        parser.error(str(error))
    ray.init(include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    serve.run(app, name="kvtier", blocking=True)


if __name__ == "__main__":
    main()
