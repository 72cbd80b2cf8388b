"""Optional packages: no module imports one before it is asked for, and a missing one is a line that says what to do."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from package_builds import ROOMS, ROOT

import kvtier

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What users import or start, without any extra. Adapters are imported by the engine that they are for.
STARTS = [
    "kvtier.cli.main",
    "kvtier.store.remote.object_remote",
    *sorted({getattr(kvtier, name).__module__ for name in kvtier.__all__ if name != "__version__"}),
]
FALLS_BACK = {"triton", "cuda", "cupy"}  # kvtier tries these, and has another way
# Functions of these modules are called only after the extra was asked for, in the module or by its caller.
ASKED_BEFORE = {
    "kvtier.cli.route": "route",
    "kvtier.engine.images.check": "images",  # by open_images
    "kvtier.engine.kv_events": "events",
    "kvtier.engine.model.lora_adapter": "lora",  # by adapter_folder
    "kvtier.engine.model.structured.grammar": "structured",  # by grammars, as for the next three
    "kvtier.engine.model.structured.grammars": "structured",
    "kvtier.engine.model.structured.notation": "structured",
    "kvtier.engine.model.structured.trial": "structured",
    "kvtier.engine.observability.tracing.span_sender": "otel",
    "kvtier.store.codec.cipher": "crypto",
    "kvtier.store.remote.objects.bucket": "object",
}


def canonical(requirement: str) -> str:
    """The name of the distribution that *requirement* names, as pip compares it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement)[0]).lower()


distributions_of_packages = cache(packages_distributions)


@cache
def packages_of(requirements: tuple[str, ...]) -> frozenset[str]:
    """The import names of the distributions that *requirements* name, as far as they are installed here."""
    wanted = {canonical(requirement) for requirement in requirements}
    return frozenset(
        name for name, dists in distributions_of_packages().items() if wanted & {canonical(dist) for dist in dists}
    )


@dataclass(frozen=True)
class Import:
    """One import in a module."""

    name: str  # of what is imported
    line: int
    extras: frozenset[str]  # of the `with extra(...)` blocks around it, and for a function those of its module


@cache
def modules() -> dict[str, Path]:
    """The files of all modules of kvtier, by name."""
    found = {"kvtier": ROOT / "kvtier" / "__init__.py", "kvtier.extras": ROOT / "kvtier" / "extras.py"}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(("kvtier", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


def imports_in(node: ast.AST, in_functions: frozenset[str], extras: frozenset[str] = frozenset()) -> Iterator[Import]:
    """All imports below *node*, without those for type checkers. Those in functions are within *in_functions* too."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.Import():
                yield from (Import(alias.name, child.lineno, extras) for alias in child.names)
            case ast.ImportFrom(module=str(module)):
                yield from (Import(f"{module}.{alias.name}", child.lineno, extras) for alias in child.names)
            case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(module))]):
                yield Import(module, child.lineno, extras)
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="extra"), args=[first, *_]))]):
                yield from imports_in(child, in_functions, extras | {ast.literal_eval(first)})
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from imports_in(child, in_functions, extras | in_functions)
            case _:
                yield from imports_in(child, in_functions, extras)


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    return tuple(
        imports_in(
            ast.parse(modules()[module].read_text()),
            frozenset({ASKED_BEFORE[module]} if module in ASKED_BEFORE else ()),
        )
    )


def module_of(name: str) -> str | None:
    """The module of kvtier that importing *name* runs: the name itself, or what it is an attribute of."""
    if name.partition(".")[0] != "kvtier":
        return None
    while name not in modules():
        name = name.rpartition(".")[0]
    return name


def packages_it_runs(module: str) -> Iterator[str]:
    """*module* and the packages that it is in, whose `__init__` runs before it."""
    parts = module.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def unguarded(start: str) -> dict[str, str]:
    """Return what *start* leads to that neither kvtier nor the extras around it install: the imports, and the way."""
    faults: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(module, frozenset[str](), start) for module in packages_it_runs(start)]
    while waiting:
        module, held, way = waiting.pop()
        if (module, held) in seen:
            continue
        seen.add((module, held))
        for each in imports_of(module):
            within = held | each.extras
            if (inner := module_of(each.name)) is not None:
                waiting += [(package, within, f"{way} > {package}") for package in packages_it_runs(inner)]
                continue
            package = each.name.partition(".")[0]
            requirements = [*PROJECT["dependencies"], *(one for name in within for one in EXTRAS[name])]
            if package not in sys.stdlib_module_names | packages_of(tuple(requirements)) | FALLS_BACK:
                faults[f"{modules()[module].relative_to(ROOT)}:{each.line} {each.name}"] = f"{way}, in {sorted(within)}"
    return faults


@pytest.mark.parametrize("start", STARTS)
def test_an_optional_package_is_imported_only_where_its_extra_was_asked_for(start: str) -> None:
    assert unguarded(start) == {}


def test_a_module_of_no_extra_is_found_by_these_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    careless = tmp_path / "careless.py"
    careless.write_text("import redis\nwith extra('redis', 'it'):\n    import redis.crc\n")
    monkeypatch.setitem(modules(), "kvtier.careless", careless)

    assert [each.name for each in imports_of("kvtier.careless") if not each.extras] == ["redis"]


def test_each_extra_that_is_asked_for_exists() -> None:
    asked = set()
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                index = {"extra": 0, "require_packages": 1}.get(node.func.id)
                asked |= set() if index is None else {ast.literal_eval(node.args[index])}

    assert asked
    assert asked <= set(EXTRAS)


def test_no_message_names_an_extra_on_its_own() -> None:
    """All say it by `kvtier.extras`, but for the model in a wheel, of which extras know nothing."""
    told = [
        f"{path.relative_to(ROOT)}"
        for path in modules().values()
        if re.search(r"pip install 'kvtier\[", path.read_text())
    ]

    assert sorted(told) == ["engine/model/checkpoint.py", "kvtier/extras.py"]
