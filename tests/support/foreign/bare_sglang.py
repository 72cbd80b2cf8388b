"""SGLang's host pools, storage classes and cache controller on a CPU, unmodified, out of its wheel.

Importing this makes `sglang.srt...` importable. Two things are in the way there. The package's own `__init__` imports
the front end, the CUDA kernels behind it, and patches of transformers' image processors: the package is made without
running it. And modules of multimodal models import torchvision, which has no build for a CPU's torch: its modules are
empty here, and what is taken out of them is a class without anything in it. Nothing that is tested uses either.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import transformers.utils

EMPTY = "torchvision"


class EmptyModule(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class EmptyModules:
    """Finds torchvision and all of its modules."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == EMPTY else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See `importlib.abc.Loader`."""
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""


def _make_bare() -> None:
    found = importlib.util.find_spec("sglang")
    if found is None or found.submodule_search_locations is None:
        raise ImportError("no sglang here: make .venv/sglang/installed")
    transformers.utils.is_torchvision_available()  # before it seems to be there
    sys.meta_path.append(EmptyModules())
    bare = ModuleType("sglang")
    bare.__path__ = list(found.submodule_search_locations)
    sys.modules["sglang"] = bare


_make_bare()

import sglang.srt.managers.cache_controller  # noqa: E402, F401
