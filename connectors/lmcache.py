"""The module that LMCache's `--l2-adapter` names: `"type": "plugin", "module_path": "kvtier.connectors.lmcache"`."""

from kvtier.connectors.lmcache_l2.adapter import KVTierL2, KVTierL2Config

__all__ = ["KVTierL2", "KVTierL2Config"]
