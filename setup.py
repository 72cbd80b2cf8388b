"""The list of packages. The rooms are folders at the repository's top, which setuptools cannot find by itself."""

from setuptools import find_packages, setup

ROOMS = ["cli", "connectors", "engine", "routing", "server", "sidecar", "store", "tiers", "transfer", "web"]

found = find_packages(include=[*ROOMS, *(f"{room}.*" for room in ROOMS)])
setup(
    packages=["kvtier", "kvtier.configs", *(f"kvtier.{name}" for name in found)],
    package_dir={"kvtier": "kvtier", "kvtier.configs": "configs", **{f"kvtier.{room}": room for room in ROOMS}},
)
