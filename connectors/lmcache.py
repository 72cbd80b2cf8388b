"""The module to name in LMCache's option `--l2-adapter`, to use kvtier as an L2 adapter.

The option's JSON has `"type": "plugin", "module_path": "kvtier.connectors.lmcache"`.
"""

from kvtier.connectors.lmcache_l2.adapter import KVTierL2, KVTierL2Config

__all__ = ["KVTierL2", "KVTierL2Config"]
