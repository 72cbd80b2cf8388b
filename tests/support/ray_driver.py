"""A process that starts Ray and Serve on loopback and does what it is told: `python ray_driver.py PORT FOLDER`.

It is told in lines of JSON, which it answers with one each, and ends Ray when there are no more. Ray leaves files and
threads behind in the process that it was started in, so that is none of the tests'.
"""

import gc
import json
import os
import sys
from dataclasses import asdict
from typing import Any

import numpy as np

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
os.environ["RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "0.2"  # by default ten seconds
os.environ["RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = "60"  # a busy machine is no reason to go elsewhere
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (15 by default: beside other tests replicas start in minutes)

import ray
from ray import serve

from kvtier.routing.question import COMPLETIONS, Question
from kvtier.routing.ray_serve.app import build_app
from kvtier.routing.ray_serve.received_request import ReceivedRequest, Stage, Wanted, Way
from kvtier.routing.ray_serve.request_router import PrefixRequestRouter


def deploy(name: str, args: dict[str, Any]) -> None:
    """Deploy kvtier's application under that name."""
    serve.run(build_app(args), name=name, route_prefix=f"/{name}")


def kill(name: str, replica: str) -> None:
    """End a replica at once."""
    ray.kill(ray.get_actor(f"SERVE_REPLICA::{name}#Engine#{replica}", namespace="serve"), no_restart=True)


def num_running(name: str) -> int:
    """How many replicas are ready."""
    return serve.status().applications[name].deployments["Engine"].replica_states.get("RUNNING", 0)


def wanted(prompt: list[int]) -> Wanted:
    """A prompt as request routers look for it."""
    return Wanted(Question(b""), np.array(prompt, dtype=np.uint32), None, "")


def ask(name: str, model: str, prompt: list[int]) -> list[Any]:
    """Have a replica answer that the request router of this process chooses: status and headers."""
    engine = serve.get_deployment_handle("Engine", name).options(method_name="answer", stream=True)
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 1}).encode()
    way = Way(wanted(prompt))
    head, *_ = engine.remote(ReceivedRequest("POST", COMPLETIONS, b"", [], body), way)
    way.stage = Stage.ENDED
    return [head["status"], {key.decode(): value.decode() for key, value in head["headers"]}]


def known(name: str, prompt: list[int]) -> dict[str, dict[str, int]]:
    """What the request router of this process knows of a prompt: tokens by replica and tier."""
    serve.get_deployment_handle("Engine", name).running_replicas_populated()  # has Ray make the router
    routers = [each for each in gc.get_objects() if isinstance(each, PrefixRequestRouter) and each.app_name == name]
    found = routers[0].matched(wanted(prompt)) if routers else {}
    return {replica: asdict(matched) for replica, matched in found.items()}


VERBS = {"known": known, "deploy": deploy, "kill": kill, "ask": ask, "num_running": num_running, "delete": serve.delete}


def main(port: int, folder: str) -> None:
    """Do what comes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray says
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        print("{}", file=answers, flush=True)
        for line in sys.stdin:
            told = json.loads(line)
            done = VERBS[told.pop("do")](**told)
            print(json.dumps(done), file=answers, flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
