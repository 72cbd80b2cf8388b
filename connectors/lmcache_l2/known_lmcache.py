"""The check that the installed LMCache has the classes that the adapter was written for."""

from dataclasses import fields

TESTED = ("0.5.6", "0.5.7rc2")  # with LMCache's own classes and its real server: tests/connectors/test_lmcache_l2.py
ABSTRACT = {
    *("get_store_event_fd", "get_lookup_and_lock_event_fd", "get_load_event_fd"),
    *("submit_store_task", "pop_completed_store_tasks", "submit_load_task", "query_load_result"),
    *("submit_lookup_and_lock_task", "query_lookup_and_lock_result", "submit_unlock", "close"),
}
ALSO_ABSTRACT = {"get_memory_tags"}  # in lmcache 0.5.7
KEY_FIELDS = {"chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"}
MEMORY_PARTS = ("byte_array", "get_size", "metadata")


class UnsupportedEngine(ValueError):
    """The error for an LMCache version or configuration that the adapter does not support."""


def check_lmcache(adapter: type, key: type, memory: type) -> None:
    """Raise `UnsupportedEngine` if LMCache's classes differ from those that the adapter was written for.

    *adapter* and *memory* are LMCache's abstract classes of L2 adapters and of an object's memory. *key* is LMCache's
    dataclass for the key of an object. An additional field is not supported, because the adapter would give the same
    name to objects whose keys differ only in this field.
    """
    unknown = (set(getattr(adapter, "__abstractmethods__", ())) ^ ABSTRACT) - ALSO_ABSTRACT
    unknown |= {field.name for field in fields(key)} ^ KEY_FIELDS
    unknown |= {part for part in MEMORY_PARTS if not hasattr(memory, part)}
    if unknown:
        raise UnsupportedEngine(
            f"the adapter does not support this LMCache, whose classes differ in {', '.join(sorted(unknown))}; "
            f"install lmcache {' or '.join(TESTED)}, or a kvtier that supports your version"
        )
