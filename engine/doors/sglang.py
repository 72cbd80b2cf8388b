"""What SGLang's `--hicache-storage-backend-extra-config` names: `"module_path": "kvtier.engine.doors.sglang"`."""

from kvtier.engine.doors.sglang_storage.backend import KVTierStorage

__all__ = ["KVTierStorage"]
