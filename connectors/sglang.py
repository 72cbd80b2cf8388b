"""The module for SGLang's `--hicache-storage-backend-extra-config`: `"module_path": "kvtier.connectors.sglang"`."""

from kvtier.connectors.sglang_storage.backend import KVTierStorage

__all__ = ["KVTierStorage"]
