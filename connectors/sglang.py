"""What SGLang's `--hicache-storage-backend-extra-config` names: `"module_path": "kvtier.connectors.sglang"`."""

from kvtier.connectors.sglang_storage.backend import KVTierStorage

__all__ = ["KVTierStorage"]
