"""The configuration of an engine with documents."""

from pathlib import Path

BLOCK_SIZE = 16


BLOCK_BYTES = BLOCK_SIZE * 1024  # of every small model


CHUNK = 64


def tables(folder: Path | None = None, num_host_slots: int = 200, num_slots: int = 200, **disk: object) -> dict:
    config: dict[str, object] = {
        "device": {"capacity": num_slots * BLOCK_BYTES, "block_size": BLOCK_SIZE},
        "host": {"capacity": num_host_slots * BLOCK_BYTES},
        "scheduler": {"prefill_chunk": CHUNK, "token_budget": 2 * CHUNK, "load": "always"},
    }
    if folder is not None:
        config["disk"] = {"path": str(folder / "store"), "capacity": "64MiB", **disk}
    return config
