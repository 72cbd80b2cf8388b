"""What vLLM's `--kv-transfer-config` names: `"kv_connector_module_path": "kvtier.engine.doors.vllm"`."""

from kvtier.engine.doors.vllm_connector.connector import KVTierConnector

__all__ = ["KVTierConnector"]
