"""What the real vLLM has of options, and which namespaces they make: vllm_options.py MODEL VARIANTS. Runs in the
environment that install.py makes; the last line out is JSON."""

import dataclasses
import json
import os
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

for name, value in {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
    os.environ.setdefault(name, value)

import vllm  # noqa: E402  # it reads the environment
from vllm.config import VllmConfig  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402

from kvtier.connectors.vllm_connector.engine_facts import engine_facts  # noqa: E402
from kvtier.connectors.vllm_connector.engine_layout import namespace_of  # noqa: E402

USUAL = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}


def options(kind: type, path: str = "", above: tuple[type, ...] = ()) -> list[str]:
    """The paths of all options of a class of configurations, and of those that its fields are."""
    found = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name = f"{path}{field.name}"
        hint = hints.get(field.name, field.type)
        inner = [each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each)]
        found += [] if inner else [name]
        for each in inner:
            found += [] if each in above else options(each, f"{name}.", (*above, kind))
    return found


def namespace(model: str, **changes: object) -> str:
    """The namespace of an engine with these arguments."""
    config = EngineArgs(model=model, **{**USUAL, **changes}).create_engine_config()
    kv_cache_config = SimpleNamespace(hash_block_size=16, kv_cache_layout="NHD")
    return namespace_of(engine_facts(config, kv_cache_config, "w", "key"), (), ()).hex()


def readers(word: str) -> list[str]:
    """The files of models and layers that have this word."""
    root = Path(vllm.__file__).parent / "model_executor"
    files = [file for folder in ("models", "layers") for file in (root / folder).rglob("*.py")]
    return sorted(str(file.relative_to(root)) for file in files if word in file.read_text())


def main(model: str, variants: str) -> None:
    """Print it."""
    namespaces = {name: namespace(model, **changes) for name, changes in json.loads(variants).items()}
    print(
        json.dumps(
            {"options": options(VllmConfig), "namespaces": namespaces, "reads max_model_len": readers("max_model_len")}
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
