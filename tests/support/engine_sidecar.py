"""A `kvtier sidecar` in a process of its own, at which kvtier's engines attach."""

from pathlib import Path

from foreign.running import Sidecar


def started_sidecar(folder: Path, socket: str, tables: str = "", http_port: int | None = None) -> Sidecar:
    """One of host memory, of many extents, and disk that engines find at *socket*. *tables*: more of its TOML. Without
    *http_port* there is no HTTP."""
    config = folder / "sidecar.toml"
    config.write_text(f'extent = "1MiB"\n{tables}')
    options = ["--config", str(config), "--host", "32MiB", "--disk", f"{folder / 'store'}:64MiB"]
    return Sidecar(f"ipc://{folder / 'lmcache.sock'}", "--socket", socket, *options, http_port=http_port)
