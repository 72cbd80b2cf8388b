"""Names the packages: the rooms stand at the repository's top, and `kvtier/` has links to them."""

from setuptools import find_packages, setup

ROOMS = "cli connectors engine routing server sidecar store tiers transfer web".split()

setup(
    packages=[
        "kvtier",
        "kvtier.configs",
        *(f"kvtier.{name}" for name in find_packages(include=[*ROOMS, *(f"{r}.*" for r in ROOMS)])),
    ],
    package_dir={"kvtier": "kvtier", "kvtier.configs": "configs", **{f"kvtier.{room}": room for room in ROOMS}},
)
