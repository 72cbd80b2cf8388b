"""StoredResponses keeps each tenant's newest responses within a number and a size, and apart from other tenants."""

import msgspec

from kvtier.server.responses.items import MessageItem
from kvtier.server.responses.stored_responses import StoredResponse, StoredResponses, encoded

ITEM = MessageItem("user", "Hello?")


def response(num_bytes: int = 100, num_items: int = 0) -> StoredResponse:
    """A response of about that size."""
    return StoredResponse(b"x" * num_bytes, encoded([ITEM] * num_items))


def stored(
    responses: int = 10, num_bytes: int = 10_000, num_tenants: int = 2, names: str = "", tenant: str | None = None
) -> StoredResponses:
    """A store with a response of 100 bytes under each of the names."""
    store = StoredResponses(responses, num_bytes, lambda: num_tenants)
    for name in names:
        assert store.put(tenant, name, response())
    return store


def found(store: StoredResponses, names: str, tenant: str | None = None) -> str:
    return "".join(name for name in names if store.find(tenant, name) is not None)


def test_the_least_recently_used_response_is_evicted_beyond_the_number() -> None:
    store = stored(responses=3, names="abc")
    store.find(None, "a")

    store.put(None, "d", response())

    assert found(store, "abcd") == "acd"


def test_responses_are_evicted_until_the_rest_fits_into_the_bytes() -> None:
    store = stored(num_bytes=350, names="abc")

    store.put(None, "d", response(200))

    assert found(store, "abcd") == "cd"


def test_the_items_of_a_conversation_count() -> None:
    small, large = response(), response(num_items=10)

    assert large.num_bytes > small.num_bytes + 10 * len(msgspec.json.encode(ITEM))


def test_a_response_too_large_for_the_store_evicts_nothing() -> None:
    store = stored(num_bytes=300, names="ab")

    assert not store.put(None, "c", response(400))

    assert found(store, "abc") == "ab"


def test_nothing_is_stored_when_the_number_is_0() -> None:
    store = stored(responses=0)

    assert not store.put(None, "a", response())
    assert store.find(None, "a") is None


def test_a_deleted_response_gives_its_bytes_back() -> None:
    store = stored(num_bytes=300, names="abc")

    assert store.delete(None, "b")
    assert not store.delete(None, "b")
    store.put(None, "d", response())

    assert found(store, "abcd") == "acd"


def test_a_response_replaces_one_of_the_same_id() -> None:
    store = stored(num_bytes=300, names="abc")

    store.put(None, "a", response(50))

    assert found(store, "abc") == "abc"
    assert len(store.find(None, "a").content) == 50


def test_tenants_neither_find_nor_evict_each_others_responses() -> None:
    store = stored(responses=2, names="ab", tenant="ann")
    for name in "xyz":
        store.put("bob", name, response())

    assert (found(store, "abxyz", "ann"), found(store, "abxyz", "bob")) == ("ab", "yz")
    assert not store.delete("bob", "a")


def test_tenants_beyond_the_number_of_keys_are_forgotten_longest_unused_first() -> None:
    store = stored(num_tenants=2, names="a", tenant="ann")
    store.put("bob", "b", response())
    store.find("ann", "a")

    store.put("cid", "c", response())

    assert [found(store, "abc", tenant) for tenant in ("ann", "bob", "cid")] == ["a", "", "c"]


def test_the_items_of_a_conversation_are_those_that_were_stored() -> None:
    store = stored()
    store.put(None, "a", response(num_items=2))

    assert store.find(None, "a").items() == [ITEM, ITEM]
