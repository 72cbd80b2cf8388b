"""The arguments of an application for Ray Serve: what is refused, before anything is deployed."""

from pathlib import Path

import pytest
import yaml

from kvtier.routing.ray_serve.config import ray_serve_config

EXAMPLE = Path(__file__).parents[3] / "configs" / "ray" / "serve.yaml"
SIDECAR = {"host": {"capacity": "1GiB"}}


def test_the_example_is_a_configuration() -> None:
    (application,) = yaml.safe_load(EXAMPLE.read_text())["applications"]

    config = ray_serve_config(application["args"])

    assert config.engine_config(sidecar="unix:///a").device.capacity == 24 << 30
    assert config.sidecar is not None


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ({}, "model"),
        ({"model": "m", "replica": {}}, "replica"),
        ({"model": "m", "engine": {"device": {"capacty": 1}}}, "capacty"),
        ({"model": "m", "sidecar": {"host": {"capacty": 1}}}, "capacty"),
        ({"model": "m", "policy": {"host_cost": 2}}, "host_cost"),
        ({"model": "m", "engine": {"events": {}}}, "events"),
        ({"model": "m", "engine": {"disk": {"path": "/a", "capacity": "1GiB"}}}, "disk"),
        ({"model": "m", "engine": {"documents": {"path": "/a"}}}, "documents"),
        ({"model": "m", "engine": {"sidecar": "unix:///a"}}, "sidecar"),
        ({"model": "m", "engine": {"host": {"capacity": "1GiB"}}, "sidecar": SIDECAR}, "host"),
    ],
)
def test_a_mistake_is_named(args: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        ray_serve_config(args)
