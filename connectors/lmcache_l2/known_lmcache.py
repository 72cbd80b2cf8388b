"""The classes of LMCache that the adapter was written for."""

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

    *adapter* and *memory* are abstract classes, *key* is the dataclass that names an object. If keys had a field that
    the adapter does not know, it would take objects that differ only in this field for the same object.
    """
    unknown = (set(getattr(adapter, "__abstractmethods__", ())) ^ ABSTRACT) - ALSO_ABSTRACT
    unknown |= {field.name for field in fields(key)} ^ KEY_FIELDS
    unknown |= {part for part in MEMORY_PARTS if not hasattr(memory, part)}
    if unknown:
        raise UnsupportedEngine(
            f"this LMCache differs in {', '.join(sorted(unknown))}, on which the adapter depends; "
            f"install lmcache {' or '.join(TESTED)}, or a kvtier that supports your version"
        )
