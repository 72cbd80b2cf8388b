"""The module to name as `module_path` in SGLang's `--hicache-storage-backend-extra-config`."""

from kvtier.connectors.sglang_storage.backend import KVTierStorage

__all__ = ["KVTierStorage"]
