"""The page docs/reference/configuration.md, made from the structs that the configurations are parsed into.

A key's meaning is the section `Attributes:` of its struct's docstring.
"""

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
from msgspec import inspect as types
from page_text import bullet, link_to, paragraph, title_of

from kvtier.engine.config import ByteSize, Config, Table
from kvtier.routing.config import RouteConfig
from kvtier.sidecar.config import SidecarConfig

INTRODUCTION = """# Configuration

`kvtier serve`, `kvtier sidecar` and `kvtier route` read one TOML file each: `--config FILE`. The library's `LLM` and
`AsyncLLM` take the same tables as `kvtier serve`, as a dict or as a file. The file is read once, at start.

- Options of the command line override keys of the file.
- An unknown key is an error that names the key, and the closest known one.
- A size is a number of bytes, or a text such as `"8GiB"` (8 × 1024³ bytes) or `"64KB"` (64,000 bytes).
- `--check-config` prints the resulting configuration and starts nothing.
- Instead of a file, `kvtier serve` takes the name of a shipped configuration: `laptop`, `longdoc-qa` or `gpu-8gb`.

This page is generated from the code by `make reference`.
"""
MORE = {  # pages about a table, by its path in the configuration of an engine
    "device": "docs/explanation/reuse.md",
    "disk": "docs/explanation/disk.md",
    "remote": "docs/how-to/remote-tier.md",
    "names": "docs/explanation/namespaces.md",
    "scheduler": "docs/explanation/reuse.md",
    "events": "docs/how-to/kv-events.md",
    "documents": "docs/how-to/documents.md",
    "server": "docs/how-to/limits.md",
    "operators": "docs/how-to/operate.md",
    "metrics": "docs/reference/metrics.md",
    "request_log": "docs/how-to/logs.md",
    "tracing": "docs/how-to/tracing.md",
    "dashboard": "docs/how-to/dashboard.md",
    "tenants": "docs/how-to/keys-and-tenants.md",
    "lora": "docs/how-to/lora.md",
    "socket": "docs/how-to/sidecar.md",
    "lmcache": "docs/how-to/vllm-lmcache.md",
    "http": "docs/reference/sidecar-http.md",
    "models": "docs/explanation/namespaces.md",
    "policy": "docs/how-to/route.md",
}
EXAMPLES: Mapping[str, object] = {  # values of keys that have no default
    "api_keys": "keys.toml",
    "audit": "/var/log/kvtier/audit.jsonl",
    "ca_file": "/etc/ssl/cache-ca.pem",
    "disk.path": "~/.cache/kvtier",
    "documents.path": "/var/lib/kvtier-documents",
    "dashboard.path": "/var/lib/kvtier-history",
    "encryption_key_command": "pass show kvtier",
    "encryption_key_file": "/etc/kvtier.key",
    "endpoint": "https://objects.example:9000",
    "endurance": "600TB",
    "events": "tcp://10.0.0.1:5557",
    "gpu_memory_utilization": 0.9,
    "lora.path": "adapters/legal",
    "max_prompt_tokens": 30000,
    "max_written_bytes_per_day": "2TB",
    "metrics_port": 9400,
    "model_name": "qwen",
    "models.path": "/models/Llama-3.1-8B-Instruct",
    "password_file": "/etc/kvtier.redis",
    "region": "eu-central-1",
    "replay": "tcp://10.0.0.1:5558",
    "replay_endpoint": "tcp://*:5558",
    "replicas.name": "one",
    "replicas.url": "http://10.0.0.1:8000",
    "request_log.path": "/var/log/kvtier/requests.jsonl",
    "retention_tokens": 0,
    "revision": "2026-11-22",
    "seed": "a secret",
    "sidecar": "unix:///run/kvtier.sock",
    "tenants.disk": "100GiB",
    "tenants.host": "20GiB",
    "tenants.name": "team-a",
    "timeout_s": 2.0,
    "token": "a secret of many characters",
    "token_file": "/etc/kvtier/token",
    "tokens": "operators.toml",
    "tool_call_parser": "hermes",
    "tracing.endpoint": "http://127.0.0.1:4318",
    "url": "redis://cache:6379",
    "writes": "buffered",
}
NAMED = {
    "tenants": 'tenants."a cache_salt"',
    "lora": "lora.legal",
    "models": 'models."meta-llama/Llama-3.1-8B-Instruct"',
}


@dataclass(frozen=True)
class Part:
    """A table of a configuration: its path, its struct, and whether it is there by default."""

    path: str
    kind: type[Table]
    is_there: bool
    opening: str  # how the table begins in TOML


def configuration_page() -> str:
    """Return the page."""
    known: set[type[Table]] = set()
    sections = [
        _section("`kvtier serve` and the library", "", Config, known),
        _section("`kvtier sidecar`", " of the sidecar", SidecarConfig, known),
        _section("`kvtier route`", " of the router", RouteConfig, known),
    ]
    return INTRODUCTION + "".join(sections)


def parts_of(kind: type[Table]) -> list[Part]:
    """The tables of a configuration of type *kind*, the keys outside of tables first."""
    parts = [Part("", kind, True, "")]
    for field in msgspec.structs.fields(kind):
        table = _table_in(field.type)
        if table is not None:
            shape = types.type_info(field.type)
            opening = f"[{NAMED.get(field.name, field.name)}]"
            if isinstance(shape, types.ListType):
                opening = f"[[{field.name}]]"
            is_plain = not isinstance(shape, types.DictType | types.ListType)
            parts.append(Part(field.name, table, is_plain and field.default is not None, opening))
    return parts


def keys_of(part: Part) -> list[msgspec.structs.FieldInfo]:
    """The keys of a table, without the tables below it."""
    return [field for field in msgspec.structs.fields(part.kind) if _table_in(field.type) is None]


def meanings_of(kind: type[Table]) -> dict[str, str]:
    """The meaning of each key, from the docstrings of the struct and of those that it extends."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        section = inspect.cleandoc(each.__doc__ or "").partition("\nAttributes:\n")[2]
        for item in re.split(r"\n(?=\S)", textwrap.dedent(section).strip()):
            name, _, text = item.partition(": ")
            found[name] = " ".join(text.split())
    return found


def example_of(kind: type[Table]) -> str:
    """A TOML file with every key: those with a default have it, others are comments with an example."""
    lines: list[str] = []
    for part in parts_of(kind):
        is_needed = part.opening.startswith("[[")
        prefix = "" if part.is_there or is_needed else "# "
        if part.opening:
            lines += ["", f"{prefix}{part.opening}"]
        for field in keys_of(part):
            value = _default_of(field)
            is_missing = value is None and not (is_needed and field.required)
            shown = example_value(part, field.name) if value is None else value
            lines.append(f"{'# ' if is_missing and not prefix else prefix}{field.name} = {_toml(shown)}")
    return "\n".join(lines).strip() + "\n"


def example_value(part: Part, key: str) -> object:
    """An example of a key that has no default."""
    path = f"{part.path}.{key}"
    return EXAMPLES[path] if path in EXAMPLES else EXAMPLES[key]


def type_text(kind: object) -> str:
    """The type of a key in words."""
    return _words_of(types.type_info(kind))


def _section(title: str, suffix: str, kind: type[Table], known: set[type[Table]]) -> str:
    parts = [f"\n## {title}\n"]
    same = [part for part in parts_of(kind) if part.kind in known]
    for part in parts_of(kind):
        if part.kind in known or not (fields := keys_of(part)):
            continue
        known.add(part.kind)
        heading = f"`{part.opening}`" if part.opening else "Keys that are in no table"
        heading = heading.replace(NAMED.get(part.path, "\0"), f"{part.path}.NAME")
        parts.append(f"\n### {heading}{suffix}\n\n")
        if part.opening:
            parts += [paragraph(text) + "\n" for text in _about(part)]
        meanings = meanings_of(part.kind)
        parts += [bullet(*_item(field, meanings[field.name])) for field in fields]
    if same:
        links = ", ".join(f"[`[{part.path}]`](#{_anchor(part)})" for part in same)
        parts.append("\n" + paragraph(f"These tables have the same keys as for `kvtier serve`: {links}."))
    parts.append(f"\n### All keys{suffix}\n\n")
    parts.append(
        paragraph(
            "Active lines show defaults. Keys without a default, and tables that are not there by default, are "
            "comments with an example."
        )
    )
    parts.append(f"\n```toml\n{example_of(kind)}```\n")
    return "".join(parts)


def _anchor(part: Part) -> str:
    return f"{part.path}name" if part.path in NAMED else part.path


def _about(part: Part) -> Iterator[str]:
    """What the docstring of a table says, without its first words and without its keys."""
    text = inspect.cleandoc(part.kind.__doc__ or "").partition("\nAttributes:\n")[0]
    for number, each in enumerate(text.strip().split("\n\n")):
        said = re.sub(r"^`\[+[^`]*\]+`: ", "", each) if number == 0 else each
        yield f"{said[:1].upper()}{_marked(said[1:])}"
    if part.path in MORE:
        yield f"More: [{title_of(MORE[part.path])}]({link_to(MORE[part.path])})."


def _item(field: msgspec.structs.FieldInfo, meaning: str) -> tuple[str, str]:
    default = _default_of(field)
    told = "required" if field.required else "not set" if default is None else f"default `{_toml(default)}`"
    return f"`{field.name}` ({type_text(field.type)}; {told})", _marked(meaning)


def _marked(text: str) -> str:
    """Names that a docstring marks with stars, as code."""
    return re.sub(r"(?<![\w*`])\*([\w.]+)\*(?![\w*`])", r"`\1`", text)


def _table_in(kind: object) -> type[Table] | None:
    """The struct of a key that is a table, an array of tables, or a table of named tables."""
    for each in (kind, *getattr(kind, "__args__", ())):
        if isinstance(each, type) and issubclass(each, Table):
            return each
    return None


def _default_of(field: msgspec.structs.FieldInfo) -> object:
    """The default of a key. None if there is none, or if it is an empty text that a file may not have."""
    shape = types.type_info(field.type)
    if field.default == "" and isinstance(shape, types.StrType) and shape.min_length:
        return None
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def _words_of(shape: types.Type) -> str:  # noqa: PLR0911  # a table of cases
    if isinstance(shape, types.UnionType):
        return " or ".join(_words_of(each) for each in shape.types if not isinstance(each, types.NoneType))
    if isinstance(shape, types.Metadata):
        return _words_of(shape.type)
    if isinstance(shape, types.CustomType):
        return "size"
    if isinstance(shape, types.LiteralType):
        return " or ".join(f'`"{value}"`' for value in sorted(map(str, shape.values)))
    if isinstance(shape, types.VarTupleType | types.ListType):
        return f"list of {_words_of(shape.item_type)}"
    if isinstance(shape, types.IntType | types.FloatType):
        name = "integer" if isinstance(shape, types.IntType) else "number"
        return f"{name}{_range_of(shape)}"
    return {types.BoolType: "true or false", types.StrType: "text"}[type(shape)]


def _range_of(shape: types.IntType | types.FloatType) -> str:
    least = f"{shape.ge:,}" if shape.ge is not None else f"more than {shape.gt:,}" if shape.gt is not None else ""
    most = shape.le if shape.le is not None else shape.lt
    if not least:
        return ""
    if most is None or most >= 1 << 31:
        return f", {least} or more" if shape.ge is not None else f", {least}"
    return f" from {least} to {most:,}" if shape.ge is not None else f", {least}, at most {most:,}"


def _toml(value: object) -> str:
    if isinstance(value, ByteSize):
        return f'"{_size(value)}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _size(num_bytes: int) -> str:
    for unit, one in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes and num_bytes % one == 0:
            return f"{num_bytes // one}{unit}"
    return str(num_bytes)
