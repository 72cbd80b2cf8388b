"""The contract of `BlobStore`, tested on every store with every kind of codec."""

import mmap
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from store_cases import StoreCase, blob_of, key_of, kv_bytes, oldest_first
from waiting import DEADLINE_S

from kvtier.store import memory_store
from kvtier.store.blob_store import Blob, BlobStore
from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import CODECS, NO_CODEC, Codec
from kvtier.store.codec.seal import charged_bytes, seal
from kvtier.store.lmdb import data_file
from kvtier.store.lmdb import files as lmdb_files
from kvtier.store.lmdb import reader as lmdb_reader
from kvtier.store.lmdb import writer as lmdb_writer
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import DIGEST_BYTES, HEADER_BYTES, Fault, Record, digest


def read(store: BlobStore, key: bytes, num_bytes: int = 20_000) -> tuple[bytes | Fault, bytes]:
    out = bytearray(num_bytes)
    return store.read_many([key], [memoryview(out)])[0], bytes(out)


def assert_gone_as(store: BlobStore, key: bytes, fault: Fault) -> None:
    assert read(store, key)[0] == fault
    assert not store.contains(key)
    assert read(store, key)[0] == Fault.MISSING
    assert store.statistics().faults == {fault: 1}


def stored_length(header: bytes) -> int:
    """Bytes of the value before its padding."""
    record = Record.unpack(key_of(1), header)
    assert isinstance(record, Record)
    return record.stored_length


@pytest.mark.parametrize("num_bytes", [2, 1000, 4080, 4082, 20_000, 3_000_000])
def test_a_block_comes_back_bit_for_bit(store: BlobStore, num_bytes: int) -> None:
    blob = blob_of(1, num_bytes)

    store.put_many([blob])

    assert read(store, blob.key, num_bytes) == (blob.digest, kv_bytes(1, num_bytes))


def test_several_blocks_come_back_each_in_its_own_place(store: BlobStore) -> None:
    store.put_many([blob_of(n) for n in range(5)])
    outs = [bytearray(20_000) for _ in range(6)]

    results = store.read_many([key_of(n) for n in (3, 0, 9, 4, 1, 2)], [memoryview(out) for out in outs])

    assert results[2] == Fault.MISSING
    assert [digest(out) for out in outs[:2] + outs[3:]] == [blob_of(n).digest for n in (3, 0, 4, 1, 2)]


def test_a_missing_key_is_a_miss_and_no_fault(store: BlobStore) -> None:
    assert not store.contains(key_of(1))
    assert read(store, key_of(1))[0] == Fault.MISSING
    assert store.statistics().faults == {}


@pytest.mark.parametrize("position", [0.0, 0.3, 0.6, 0.999999])
def test_a_flipped_byte_is_a_miss_and_the_record_is_gone(case: StoreCase, store: BlobStore, position: float) -> None:
    store.put_many([blob_of(1), blob_of(2)])
    header, payload = case.stored(store, key_of(1))
    damaged = bytearray(payload)
    damaged[int(position * stored_length(header))] ^= 0x10
    case.overwrite(store, key_of(1), header, bytes(damaged))

    assert_gone_as(store, key_of(1), Fault.CORRUPT)
    assert read(store, key_of(2))[0] == blob_of(2).digest


def test_every_byte_of_the_header_is_guarded(case: StoreCase, store: BlobStore) -> None:
    for position in range(HEADER_BYTES):
        store.put_many([blob_of(1)])
        header, payload = case.stored(store, key_of(1))
        damaged = bytearray(header)
        damaged[position] ^= 0x01
        case.overwrite(store, key_of(1), bytes(damaged), payload)

        assert isinstance(read(store, key_of(1))[0], Fault), position
        assert not store.contains(key_of(1)), position

    assert sum(store.statistics().faults.values()) == HEADER_BYTES


@pytest.mark.parametrize("num_left", [0, 1, 5000, -1])
def test_a_truncated_payload_is_torn(case: StoreCase, store: BlobStore, num_left: int) -> None:
    store.put_many([blob_of(1)])
    header, payload = case.stored(store, key_of(1))
    case.overwrite(store, key_of(1), header, payload[: num_left % stored_length(header)])

    # In a slot nothing is shorter: what is missing reads as zeros.
    assert_gone_as(store, key_of(1), Fault.TORN if isinstance(store, MemoryStore) else Fault.CORRUPT)


def test_a_truncated_header_is_torn(case: StoreCase, store: BlobStore) -> None:
    store.put_many([blob_of(1)])
    header, payload = case.stored(store, key_of(1))
    case.overwrite(store, key_of(1), header[:-1], payload)

    assert_gone_as(store, key_of(1), Fault.TORN)


def test_a_block_of_another_length_than_asked_for_is_torn(store: BlobStore) -> None:
    store.put_many([blob_of(1, 20_002)])

    assert_gone_as(store, key_of(1), Fault.TORN)


def test_a_record_of_another_key_is_never_given_out(case: StoreCase, store: BlobStore) -> None:
    store.put_many([blob_of(1), blob_of(2)])
    case.overwrite(store, key_of(1), *case.stored(store, key_of(2)))

    assert_gone_as(store, key_of(1), Fault.CORRUPT)


def test_a_record_of_another_namespace_is_foreign(case: StoreCase, store: BlobStore) -> None:
    other = blob_of(1, namespace=b"model-B layout-1")
    store.put_many([blob_of(1), other])
    case.overwrite(store, key_of(1), *case.stored(store, other.key))

    assert_gone_as(store, key_of(1), Fault.FOREIGN)


def test_a_record_of_an_unknown_format_version_is_refused(case: StoreCase, store: BlobStore) -> None:
    store.put_many([blob_of(1)])
    header, payload = case.stored(store, key_of(1))
    case.overwrite(store, key_of(1), header[:4] + b"\x63\x00" + header[6:], payload)

    assert_gone_as(store, key_of(1), Fault.VERSION)


def test_a_record_of_an_unknown_codec_is_refused(case: StoreCase, store: BlobStore) -> None:
    store.put_many([blob_of(1)])
    _, payload = case.stored(store, key_of(1))
    record = Record(key_of(1)[:16], 999, 20_000, len(payload), blob_of(1).digest)
    case.overwrite(store, key_of(1), record.pack(key_of(1)), payload)

    assert_gone_as(store, key_of(1), Fault.VERSION)


@pytest.mark.parametrize(
    "codec", [codec for codec in CODECS.values() if codec.is_lossless], ids=lambda codec: codec.name
)
def test_records_of_every_codec_are_read_whatever_the_store_writes(
    case: StoreCase, store: BlobStore, codec: Codec
) -> None:
    store.put_many([blob_of(1)])
    sealed = seal(blob_of(1), codec)
    if sealed.payload.nbytes > len(case.stored(store, key_of(1))[1]) and not isinstance(store, MemoryStore):
        return  # longer than the slot
    case.overwrite(store, key_of(1), sealed.header, bytes(sealed.payload))

    assert read(store, key_of(1)) == (blob_of(1).digest, kv_bytes(1, 20_000))


def test_bytes_damaged_before_they_were_put_are_found_when_read(store: BlobStore) -> None:
    raw = bytearray(kv_bytes(1, 20_000))
    taken = digest(raw)
    raw[77] ^= 1
    store.put_many([Blob(key_of(1), taken, memoryview(raw))])

    assert_gone_as(store, key_of(1), Fault.CORRUPT)


def test_a_bad_record_replaced_before_it_could_be_deleted_stays(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_many([blob_of(1)])

    def see_the_old_while_another_writes(*_: object) -> Fault:
        monkeypatch.undo()
        store.delete([key_of(1)])
        store.put_many([blob_of(1)])
        return Fault.CORRUPT

    def expect_the_old_while_another_writes(*_: object) -> bytes:
        see_the_old_while_another_writes()
        return bytes(DIGEST_BYTES)

    for module in (lmdb_reader, memory_store):
        monkeypatch.setattr(module, "unseal", see_the_old_while_another_writes)
    monkeypatch.setattr(lmdb_reader, "plain_digest", expect_the_old_while_another_writes)
    read(store, key_of(1))

    assert store.contains(key_of(1))
    assert read(store, key_of(1))[0] == blob_of(1).digest


def test_verify_names_the_bad_record_and_leaves_it(case: StoreCase, store: BlobStore) -> None:
    store.put_many([blob_of(n) for n in range(3)])
    header, payload = case.stored(store, key_of(1))
    case.overwrite(store, key_of(1), header, bytes([payload[0] ^ 0x10]) + payload[1:])

    assert list(store.verify()) == [(key_of(2), None), (key_of(1), Fault.CORRUPT), (key_of(0), None)]
    assert store.contains(key_of(1))


def parts_of(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls done in parts of that size."""
    monkeypatch.setattr(data_file, "part_bytes", lambda capacity_bytes: num_bytes)


def test_a_record_of_another_encryption_key_is_a_fault_and_stays(case: StoreCase, store: BlobStore) -> None:
    store.put_many([blob_of(1)])
    sealed = seal(blob_of(1), NO_CODEC, Cipher(bytes(32)))
    case.overwrite(store, key_of(1), sealed.header, bytes(sealed.payload))

    assert read(store, key_of(1))[0] is Fault.KEY
    assert store.contains(key_of(1))
    assert store.statistics().faults == {Fault.KEY: 1}


def test_the_oldest_is_evicted_first_is_evicted_first(case: StoreCase) -> None:
    with case.open(3 * charged_bytes(1000)) as store:
        assert store.put_many([blob_of(n, 1000) for n in range(3)]) == []

        assert store.put_many([blob_of(3, 1000), blob_of(4, 1000)]) == [key_of(0), key_of(1)]
        assert oldest_first(store) == [key_of(2), key_of(3), key_of(4)]
        assert store.statistics().evicted_total == 2
        assert store.statistics().quota_evicted_total == 0
        store.check()


def test_a_touched_record_is_passed_over_once(case: StoreCase) -> None:
    with case.open(4 * charged_bytes(1000)) as store:
        store.put_many([blob_of(n, 1000) for n in range(4)])

        store.touch([key_of(2), key_of(9), key_of(0)])

        assert oldest_first(store) == [key_of(n) for n in (0, 1, 2, 3)]
        assert store.put_many([blob_of(4, 1000)]) == [key_of(1)]
        assert oldest_first(store) == [key_of(n) for n in (2, 3, 0, 4)]
        assert store.put_many([blob_of(n, 1000) for n in (5, 6)]) == [key_of(3), key_of(0)]
        assert oldest_first(store) == [key_of(n) for n in (4, 2, 5, 6)]
        store.check()


def test_if_all_are_touched_the_oldest_goes_all_the_same(case: StoreCase) -> None:
    with case.open(3 * charged_bytes(1000)) as store:
        store.put_many([blob_of(n, 1000) for n in range(3)])
        store.touch([key_of(n) for n in range(3)])

        assert store.put_many([blob_of(3, 1000)]) == [key_of(0)]
        assert oldest_first(store) == [key_of(n) for n in (1, 2, 3)]
        store.check()


def test_a_key_put_again_keeps_its_bytes_and_is_touched(case: StoreCase) -> None:
    with case.open(2 * charged_bytes(20_000)) as store:
        store.put_many([blob_of(1), blob_of(2)])
        before = store.statistics()

        store.put_many([Blob(key_of(1), bytes(16), memoryview(bytes(500)))])

        assert store.statistics() == before
        assert store.put_many([blob_of(3)]) == [key_of(2)]
        assert read(store, key_of(1))[0] == blob_of(1).digest


def chain_of(first: int, length: int, num_bytes: int = 1000) -> list[Blob]:
    """Blocks that continue each other, the last one first."""
    blobs = [blob_of(n, num_bytes) for n in range(first, first + length)]
    return [replace(blobs[i], parent=blobs[i - 1].key if i else b"") for i in reversed(range(length))]


@pytest.mark.parametrize("order", ["tail first", "head first"])
def test_a_chain_leaves_from_its_tail(case: StoreCase, order: str) -> None:
    blobs = chain_of(0, 8)
    with case.open(8 * charged_bytes(1000)) as store:
        store.put_many(blobs if order == "tail first" else blobs[::-1])
        for number in range(100, 108):
            evicted = store.put_many([blob_of(number, 1000)])
            store.check()
            left = [n for n in range(8) if store.contains(key_of(n))]
            assert left == list(range(len(left)))
            assert len(evicted) == 1


def test_a_prefix_outlives_what_was_added_to_it_later(case: StoreCase) -> None:
    whole = chain_of(0, 6)[::-1]
    with case.open(8 * charged_bytes(1000)) as store:
        store.put_many(whole[:3][::-1])
        store.put_many([blob_of(100, 1000), blob_of(101, 1000)])
        store.put_many(whole[3:][::-1])  # a second turn: its parents are the oldest now

        evicted = [key for n in range(200, 205) for key in store.put_many([blob_of(n, 1000)])]

        assert evicted == [key_of(100), key_of(101), key_of(5), key_of(4), key_of(3)]
        store.check()


def test_more_second_chances_than_fit_one_change(case: StoreCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_files, "MAX_SECOND_CHANCES", 3)
    with case.open(20 * charged_bytes(1000)) as store:
        store.put_many([blob_of(n, 1000) for n in range(20)])
        store.touch([key_of(n) for n in range(19)])

        assert store.put_many([blob_of(20, 1000), blob_of(21, 1000)]) == [key_of(19), key_of(0)]
        assert oldest_first(store) == [key_of(n) for n in range(1, 22) if n != 19]
        store.check()


def test_a_call_larger_than_the_capacity_keeps_its_last_blobs(case: StoreCase) -> None:
    with case.open(2 * charged_bytes(1000)) as store:
        assert store.put_many([blob_of(n, 1000) for n in range(5)]) == [key_of(n) for n in range(3)]

        assert oldest_first(store) == [key_of(3), key_of(4)]
        store.check()


def test_a_key_evicted_and_put_back_by_one_call_is_not_reported_as_evicted(
    case: StoreCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts_of(charged_bytes(50_000), monkeypatch)
    with case.open(2 * charged_bytes(50_000)) as store:
        store.put_many([blob_of(0, 50_000), blob_of(1, 50_000)])

        assert store.put_many([blob_of(2, 50_000), blob_of(0, 50_000)]) == [key_of(1)]
        assert set(store.keys()) == {key_of(2), key_of(0)}


def test_a_blob_larger_than_the_capacity_is_refused_and_nothing_stored(case: StoreCase) -> None:
    with case.open(charged_bytes(20_000)) as store:
        with pytest.raises(ValueError, match="raise capacity_bytes"):
            store.put_many([blob_of(1), blob_of(2, 40_000)])

        assert oldest_first(store) == []


def test_a_blob_that_fails_to_encode_leaves_nothing_of_its_call(case: StoreCase) -> None:
    case.codec = CODECS["zstd-plane-2"]
    with case.open() as store:
        store.put_many([blob_of(1)])

        with pytest.raises(ValueError, match="whole number of elements"):
            store.put_many([blob_of(2), Blob(key_of(3), bytes(16), memoryview(bytes(1001)))])

        assert oldest_first(store) == [key_of(1)]
        store.check()


def test_deleted_keys_are_gone_and_counted(store: BlobStore) -> None:
    store.put_many([blob_of(n) for n in range(4)])

    assert store.delete([key_of(0), key_of(2), key_of(9)]) == 2

    assert oldest_first(store) == [key_of(1), key_of(3)]
    assert store.delete([]) == 0


def test_what_is_asked_for_is_evicted_in_the_order_in_which_records_leave(case: StoreCase) -> None:
    charge = charged_bytes(1000)
    with case.open(100 * charge) as store:
        store.put_many([blob_of(n, 1000) for n in range(6)])
        store.touch([key_of(0)])

        assert store.evict(2 * charge, 100) == ([key_of(1), key_of(2)], 2 * charge)
        assert store.evict(100 * charge, 2) == ([key_of(3), key_of(4)], 2 * charge)
        assert store.evict(1, 100) == ([key_of(5)], charge)
        assert store.evict(100 * charge, 100) == ([key_of(0)], charge)
        assert store.evict(100 * charge, 100) == ([], 0)
        assert store.statistics().evicted_total == store.statistics().quota_evicted_total == 0
        store.check()


def test_a_tenants_records_are_evicted_and_nobody_elses(case: StoreCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_files, "MAX_SECOND_CHANCES", 3)
    charge = charged_bytes(1000)
    with case.open(100 * charge, {ANN: 50 * charge}) as store:
        store.put_many([replace(blob, tenant=ANN) for blob in chain_of(0, 5)])
        store.put_many([replace(blob, tenant=BOB) for blob in chain_of(10, 3)])
        store.put_many([blob_of(20, 1000)])
        store.touch([key_of(n) for n in range(5)])

        assert store.evict(100 * charge, 2, ANN).num_bytes == 2 * charge
        assert store.evict(100 * charge, 100, ANN).num_bytes == 3 * charge
        assert store.evict(100 * charge, 100, ANN) == ([], 0)
        assert sorted(store.keys()) == [key_of(n) for n in (10, 11, 12, 20)]
        assert store.statistics().tenants == {}
        store.check()


def test_a_closed_store_says_so_and_closes_twice(case: StoreCase) -> None:
    store = case.open()
    store.put_many([blob_of(1)])
    store.close()
    store.close()

    for use in (store.sync, store.check, store.statistics, store.keys, lambda: store.contains(key_of(1))):
        with pytest.raises(ValueError, match="closed"):
            use()
    with pytest.raises(ValueError, match="closed"):
        store.put_many([blob_of(1)])
    with pytest.raises(ValueError, match="closed"):
        read(store, key_of(1))


ANN, BOB = b"tenantA.", b"tenantB."


def test_over_its_quota_a_tenants_own_tail_goes_first(case: StoreCase) -> None:
    charge = charged_bytes(1000)
    with case.open(100 * charge, {ANN: 3 * charge, BOB: 50 * charge}) as store:
        store.put_many([replace(blob, tenant=BOB) for blob in chain_of(0, 4)])
        store.put_many([replace(blob, tenant=ANN) for blob in chain_of(10, 3)])
        assert store.statistics().tenants == {ANN: 3 * charge, BOB: 4 * charge}

        assert store.put_many([replace(blob_of(20, 1000), tenant=ANN)]) == [key_of(12)]
        assert store.put_many([replace(blob_of(n, 1000), tenant=BOB) for n in (30, 31)]) == []
        store.touch([key_of(11)])
        assert store.put_many([replace(blob_of(21, 1000), tenant=ANN)]) == [key_of(20)]
        assert store.statistics().tenants == {ANN: 3 * charge, BOB: 6 * charge}
        assert (store.statistics().evicted_total, store.statistics().quota_evicted_total) == (2, 2)
        store.check()
        store.delete([key_of(n) for n in (10, 11, 21)])
        assert store.statistics().tenants == {BOB: 6 * charge}
        store.check()


def test_a_call_beyond_a_quota_keeps_its_last_blobs(case: StoreCase) -> None:
    charge = charged_bytes(1000)
    with case.open(100 * charge, {ANN: 2 * charge, BOB: 0}) as store:
        gone = store.put_many([replace(blob_of(n, 1000), tenant=BOB if n == 2 else ANN) for n in range(5)])
        assert set(gone) == {key_of(n) for n in (0, 1, 2)}
        assert set(store.keys()) == {key_of(n) for n in (3, 4)}
        store.check()


def test_a_quota_with_more_second_chances_than_fit_one_change(case: StoreCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_files, "MAX_SECOND_CHANCES", 3)
    charge = charged_bytes(1000)
    with case.open(100 * charge, {ANN: 10 * charge}) as store:
        store.put_many([replace(blob_of(n, 1000), tenant=ANN) for n in range(10)])
        store.touch([key_of(n) for n in range(9)])

        assert store.put_many([replace(blob_of(n, 1000), tenant=ANN) for n in (10, 11)]) == [key_of(9), key_of(0)]
        store.check()


@dataclass
class Clock:
    """The order of eviction, written down a second time as plainly as possible."""

    capacity_bytes: int
    charges: dict[bytes, int]
    tenants: dict[bytes, bytes]
    quotas: dict[bytes, int]
    keys: list[bytes] = field(default_factory=list)  # oldest first
    parents: dict[bytes, bytes] = field(default_factory=dict)
    marked: set[bytes] = field(default_factory=set)

    def put(self, blobs: list[Blob]) -> None:
        new = [blob for blob in blobs if blob.key not in self.keys]
        self.touch([blob.key for blob in blobs] + [blob.parent for blob in new])
        tenants = list(dict.fromkeys(blob.tenant for blob in new if blob.tenant in self.quotas))
        self.evict([blob.key for blob in new], tenants)
        for blob in new:
            self.parents[blob.key] = blob.parent
            self.renew(blob.key)
        self.evict([], tenants)

    def evict(self, new: list[bytes], tenants: list[bytes]) -> None:
        for tenant, quota in [*((tenant, self.quotas[tenant]) for tenant in tenants), (None, self.capacity_bytes)]:
            limit_bytes = quota - sum(self.charges[key] for key in new if tenant in (None, self.tenants[key]))
            while own := [key for key in self.keys if tenant in (None, self.tenants[key])]:
                if sum(self.charges[key] for key in own) <= limit_bytes:
                    break
                self.keys.remove(own[0])
                if own[0] in self.marked:
                    self.marked.discard(own[0])
                    self.renew(own[0])

    def touch(self, keys: list[bytes]) -> None:
        self.marked.update(key for key in keys if key in self.keys)

    def renew(self, key: bytes) -> None:
        self.keys.append(key)
        if self.parents[key] in self.keys:
            self.marked.add(self.parents[key])

    def delete(self, keys: list[bytes]) -> None:
        self.keys = [key for key in self.keys if key not in keys]
        self.marked -= set(keys)

    def purge(self, limit: int, tenant: bytes) -> list[bytes]:
        gone = []
        while len(gone) < limit and (own := [key for key in self.keys if tenant in (b"", self.tenants[key])]):
            self.keys.remove(own[0])
            if own[0] in self.marked:
                self.marked.discard(own[0])
                self.renew(own[0])
            else:
                gone.append(own[0])
        return gone


def test_random_churn_agrees_with_a_model(case: StoreCase, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    capacity_bytes = 300_000
    sizes = [200, 1000, 4096, 9000, 50_000]
    blobs = {}
    for n in range(60):  # six trees
        parent = b"" if n < 6 else key_of(rng.randrange(n % 6, n, 6))
        tenant = [b"", b"", ANN, ANN, BOB, BOB][n % 6]
        blobs[key_of(n)] = replace(blob_of(n, sizes[n % 5]), parent=parent, tenant=tenant)
    charges = {key: seal(blob, case.codec).charged_bytes for key, blob in blobs.items()}
    quotas = {ANN: 100_000, BOB: 60_000}
    model = Clock(capacity_bytes, charges, {key: blob.tenant for key, blob in blobs.items()}, quotas)

    with case.open(capacity_bytes, quotas) as store:
        for _ in range(250):
            keys = rng.sample(list(blobs), rng.randint(1, 8))
            action = rng.choice(["put", "put", "put", "touch", "delete", "evict", "read"])
            if action == "put":
                before = set(model.keys)
                model.put([blobs[key] for key in keys])
                evicted = store.put_many([blobs[key] for key in keys])
                assert set(evicted) == (before | set(keys)) - set(model.keys)
            elif action == "touch":
                model.touch(keys)
                store.touch(keys)
            elif action == "delete":
                assert store.delete(keys[:2]) == sum(key in model.keys for key in keys[:2])
                model.delete(keys[:2])
            elif action == "evict":
                tenant = rng.choice([b"", ANN, BOB])
                assert store.evict(1 << 40, len(keys) // 2, tenant).keys == model.purge(len(keys) // 2, tenant)
            else:
                for key in keys:
                    expected = blobs[key].digest if key in model.keys else Fault.MISSING
                    assert read(store, key, blobs[key].raw.nbytes)[0] == expected

            store.check()
            assert oldest_first(store) == model.keys
            assert [store.contains(key) for key in keys] == [key in model.keys for key in keys]
            assert store.statistics().stored_bytes == sum(charges[key] for key in model.keys) <= capacity_bytes


@pytest.mark.long
def test_readers_beside_a_writer_never_see_wrong_bytes(case: StoreCase) -> None:
    blobs = [blob_of(n, 30_000) for n in range(40)]
    wrong: list[int] = []
    num_hits = [0, 0, 0]
    done = threading.Event()

    with case.open(12 * charged_bytes(30_000)) as store:

        def read_until_done(reader: int) -> None:
            rng = random.Random(reader)
            while not done.is_set():
                number = rng.randrange(len(blobs))
                result, out = read(store, key_of(number), 30_000)
                num_hits[reader] += result != Fault.MISSING
                if result != Fault.MISSING and (result != blobs[number].digest or out != blobs[number].raw):
                    wrong.append(number)

        readers = [threading.Thread(target=read_until_done, args=(reader,)) for reader in range(3)]
        for thread in readers:
            thread.start()
        rng = random.Random(7)
        num_calls = 0
        give_up_at = time.monotonic() + DEADLINE_S
        while num_calls < 100 or (min(num_hits) < 20 and time.monotonic() < give_up_at):
            store.put_many(rng.sample(blobs, 4))
            num_calls += 1
            time.sleep(0)  # readers on a busy machine get their turn
        done.set()
        for thread in readers:
            thread.join()
        store.check()

    assert wrong == []
    assert min(num_hits) >= 20


def test_a_parent_stays_for_its_child_however_many_second_chances_it_takes(
    case: StoreCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_files, "MAX_SECOND_CHANCES", 3)
    with case.open(20 * charged_bytes(1000)) as store:
        store.put_many([blob_of(n, 1000) for n in range(20)])
        store.touch([key_of(n) for n in range(10)])

        assert store.put_many([replace(blob_of(20, 1000), parent=key_of(10))]) == [key_of(11)]

        assert store.contains(key_of(10))
        store.check()


def test_a_call_that_brings_old_ones_again_and_new_ones(case: StoreCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_files, "MAX_SECOND_CHANCES", 3)
    monkeypatch.setattr(lmdb_writer, "MAX_EVICTED", 2)
    with case.open(40 * charged_bytes(1000)) as store:
        store.put_many([blob_of(n, 1000) for n in range(40)])

        evicted = store.put_many([blob_of(n, 1000) for n in [*range(20), *range(100, 110)]])

        assert set(evicted) == {key_of(n) for n in range(20, 30)}
        assert set(store.keys()) == {key_of(n) for n in [*range(20), *range(30, 40), *range(100, 110)]}
        store.check()


def test_more_evictions_than_fit_one_change(case: StoreCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_writer, "MAX_EVICTED", 2)
    charge = charged_bytes(1000)
    with case.open(100 * charge, {ANN: 30 * charge}) as store:
        store.put_many([replace(blob_of(n, 1000), tenant=ANN) for n in range(30)])
        store.put_many([blob_of(n, 1000) for n in range(100, 170)])

        of_ann = store.put_many([replace(blob_of(50, 20 * 1000), tenant=ANN)])
        of_all = store.put_many([blob_of(51, 50 * 1000)])

        assert of_ann == [key_of(n) for n in range(len(of_ann))]
        assert len(of_ann) > 2
        assert len(of_all) > 2
        store.check()


@pytest.mark.parametrize("num_bytes", [0, pytest.param((2 << 30) + 1, marks=pytest.mark.slow)])
def test_what_is_no_block_is_refused_and_nothing_happens(store: BlobStore, num_bytes: int) -> None:
    store.put_many([blob_of(1)])

    memory = mmap.mmap(-1, max(1, num_bytes))
    with pytest.raises(ValueError, match="must have 1 to"):
        store.put_many([Blob(key_of(2), bytes(16), memoryview(memory)[:num_bytes])])

    assert read(store, key_of(1))[0] == blob_of(1).digest
    store.put_many([blob_of(3)])
    store.check()


@pytest.mark.parametrize("key", [b"", b"k" * 512])
def test_what_can_be_no_key_is_missing(store: BlobStore, key: bytes) -> None:
    assert not store.contains(key)
    assert read(store, key)[0] is Fault.MISSING
    store.touch([key])
    assert store.delete([key]) == 0
    store.check()


def test_evictions_before_a_blob_that_cannot_be_stored_are_told_to_the_next(
    case: StoreCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts_of(charged_bytes(50_000), monkeypatch)
    with case.open(2 * charged_bytes(50_000)) as store:
        if not isinstance(store, LmdbStore) or case.codec is NO_CODEC:
            return  # of a call that fails MemoryStore does nothing; another process has another codec; "none" fits all
        store.put_many([blob_of(0, 50_000), blob_of(1, 50_000)])
        monkeypatch.setattr(type(case.codec), "encode", refuse_odd_sizes(type(case.codec).encode))

        with pytest.raises(ValueError, match="odd"):
            store.put_many([blob_of(2, 50_000), blob_of(3, 40_000)])

        assert not store.contains(key_of(0))
        assert key_of(0) in store.put_many([blob_of(4, 50_000)])


def refuse_odd_sizes(encode: Callable[..., memoryview]) -> Callable[..., memoryview]:
    def refuse(codec: Codec, raw: memoryview) -> memoryview:
        if raw.nbytes == 40_000:
            raise ValueError("odd")
        return encode(codec, raw)

    return refuse
