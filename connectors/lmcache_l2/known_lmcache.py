"""Which LMCache the adapter knows: the one place where that is said."""

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


class NotServed(ValueError):
    """LMCache is one that the adapter does not know, or is configured as the adapter does not serve."""


def check_lmcache(adapter: type, key: type, memory: type) -> None:
    """Raise `NotServed` for an LMCache whose classes are not those that the adapter was made for: *adapter* and
    *memory* are abstract, *key* is the dataclass that names an object. A field of a key that the adapter does not know
    would tell objects apart that it takes for one."""
    unknown = (set(getattr(adapter, "__abstractmethods__", ())) ^ ABSTRACT) - ALSO_ABSTRACT
    unknown |= {field.name for field in fields(key)} ^ KEY_FIELDS
    unknown |= {part for part in MEMORY_PARTS if not hasattr(memory, part)}
    if unknown:
        raise NotServed(
            f"this LMCache differs in {', '.join(sorted(unknown))}, on which the adapter rests; "
            f"install lmcache {' or '.join(TESTED)}, or a kvtier that knows yours"
        )
