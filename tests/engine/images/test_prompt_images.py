"""Images among the tokens of a prompt, and rows in a cache of limited size."""

import pytest
import torch
from chaos import FakeClock

from kvtier.engine.images.image import ImageError, PreparedImage, identity_of
from kvtier.engine.images.prompt_images import PromptImages, place_images
from kvtier.engine.images.row_cache import RowCache
from kvtier.engine.images.row_store import MAX_BYTES, RowStore
from kvtier.store.blob_store import Blob
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import digest
from kvtier.tiers.lower.breaker import MAX_FAILURES, BreakerState
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.other_records import OtherRecords
from kvtier.tiers.naming.block_hash import MultimodalItem
from kvtier.tiers.naming.tier import EvictionCause
from kvtier.transfer.lane import Finished, InlineLane
from kvtier.transfer.transfer_engine import Route, TransferEngine

IMAGE = 9
SHAPE = (2, 3, 4)
CHARGE = 4608  # what a store counts for a record of a few bytes


def image(identity: str, placeholder: list[int]) -> PreparedImage:
    return PreparedImage(identity, {}, placeholder, placeholder.count(IMAGE))


def test_each_image_token_becomes_the_placeholder_of_the_next_image() -> None:
    first, second = image("a", [5, IMAGE, IMAGE, 6, IMAGE]), image("b", [IMAGE])

    token_ids, placed = place_images([1, IMAGE, 2, IMAGE], [first, second], IMAGE)

    assert token_ids == [1, 5, IMAGE, IMAGE, 6, IMAGE, 2, IMAGE]
    assert [each.places.tolist() for each in placed] == [[2, 3, 5], [7]]
    assert PromptImages(placed).items == (MultimodalItem("a", 2, 4), MultimodalItem("b", 7, 1))


@pytest.mark.parametrize(("start", "end", "rows"), [(0, 2, (0, 0)), (0, 3, (0, 1)), (3, 6, (1, 3)), (4, 5, (2, 2))])
def test_a_chunk_has_the_rows_of_its_image_tokens(start: int, end: int, rows: tuple[int, int]) -> None:
    _, (placed,) = place_images([1, IMAGE], [image("a", [5, IMAGE, IMAGE, 6, IMAGE])], IMAGE)

    assert placed.rows_in(start, end) == range(*rows)


def test_more_image_tokens_than_images_are_an_error() -> None:
    with pytest.raises(ImageError, match="has 2 image tokens, but 1 images are given"):
        place_images([IMAGE, 1, IMAGE], [image("a", [IMAGE])], IMAGE)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 2, [10, 11]), (1, 3, [11, 12]), (2, 5, [12, 6, 7]), (3, 5, [6, 7]), (7, 8, [10])],
)
def test_positions_after_the_prompt_continue_with_an_offset(start: int, end: int, expected: list[int]) -> None:
    images = PromptImages((), torch.tensor([[10, 11, 12]] * 3), 3)

    positions = images.positions(start, end)

    assert positions is not None
    assert positions.tolist() == [expected] * 3


def test_the_identity_of_an_image_covers_values_shapes_types_and_names() -> None:
    pixels = torch.arange(6, dtype=torch.float32)
    inputs = [
        {"pixel_values": pixels.view(2, 3)},
        {"pixel_values": pixels.view(3, 2)},
        {"pixel_values": pixels.view(2, 3).to(torch.float64)},
        {"pixel_values": pixels.view(2, 3) + 1},
        {"other": pixels.view(2, 3)},
        {"pixel_values": pixels.view(2, 3), "grid": torch.tensor([1, 2])},
        {"pixel_values": pixels.view(2, 3), "grid": torch.tensor([2, 1])},
    ]

    assert len({identity_of(each) for each in inputs}) == len(inputs)
    assert identity_of(inputs[0]) == identity_of({"pixel_values": pixels.clone().view(2, 3)})


def rows_of(value: float, num_bytes: int = 16) -> torch.Tensor:
    return torch.full((1, num_bytes // 4, 1), value, dtype=torch.float32)


def test_the_least_recently_used_rows_make_room() -> None:
    cache = RowCache(48)
    for number in range(3):
        cache.put(bytes([number]), rows_of(number))
    assert cache.get(b"\0") is not None

    cache.put(b"\3", rows_of(3, 20))

    assert [cache.get(bytes([number])) is not None for number in range(4)] == [True, False, False, True]
    assert cache.num_bytes == 36


def test_rows_larger_than_the_cache_leave_it_as_it_is() -> None:
    cache = RowCache(40)
    cache.put(b"a", rows_of(1))

    cache.put(b"b", rows_of(2, 44))

    assert cache.get(b"b") is None
    assert cache.get(b"a") is not None


class RowBed:
    """A store of the disk tier in memory, whose writes end when they are asked for."""

    def __init__(self, store: MemoryStore, bytes_per_day: int | None = None) -> None:
        self.store = store
        finished = Finished()
        transfers = TransferEngine({route: InlineLane(finished) for route in Route}, finished)
        self.disk = DiskTier(store, bytes(16), FakeClock(), bytes_per_day)
        self.disk.follow_opening()
        self.evicted: list[tuple[bytes, EvictionCause]] = []
        self._records = OtherRecords(
            self.disk, transfers, lambda keys, cause: self.evicted.extend((key, cause) for key in keys)
        )

    def rows(self, model: bytes) -> RowStore:
        return RowStore(self.store, self._records, model)


def test_rows_on_disk_belong_to_one_model_and_have_one_shape() -> None:
    rows = torch.randn(SHAPE)
    with MemoryStore(1 << 20) as store:
        bed = RowBed(store)
        own, other = bed.rows(b"a model"), bed.rows(b"another")
        own.write(b"k" * 32, rows, b"")
        own.flush()

        found = bed.rows(b"a model").read(b"k" * 32, SHAPE, rows.dtype)

        assert found is not None
        assert torch.equal(found, rows)
        assert other.read(b"k" * 32, SHAPE, rows.dtype) is None
        assert own.read(b"k" * 32, (2, 3, 5), rows.dtype) is None


def test_rows_that_no_change_of_the_store_takes_are_not_written() -> None:
    with MemoryStore(1 << 30) as store:
        own = RowBed(store).rows(b"a model")
        own.write(b"k" * 32, torch.empty(1, MAX_BYTES // 4 + 1, 1), b"")
        own.flush()

        assert store.statistics().num_records == 0


def test_what_rows_push_out_of_the_disk_is_told_with_its_cause() -> None:
    with MemoryStore(2 * CHARGE) as store:
        bed = RowBed(store)
        for key in (b"old", b"new"):
            store.put_many([Blob(bytes(16) + key, digest(b"block"), memoryview(b"block"))])
        own = bed.rows(b"a model")
        for key in (b"k", b"l"):
            own.write(key * 32, torch.randn(SHAPE), b"")
            own.flush()

        assert bed.evicted == [(bytes(16) + key, EvictionCause.ROOM) for key in (b"old", b"new")]


def test_rows_are_charged_to_the_daily_write_budget_and_leave_its_reserve() -> None:
    rows = torch.randn(SHAPE)
    with MemoryStore(1 << 20) as store:
        bed = RowBed(store, bytes_per_day=4 * rows.nbytes)
        own = bed.rows(b"a model")
        for number in range(4):
            own.write(bytes([number]) * 32, rows, b"")
            own.flush()

        assert store.statistics().num_records == 3
        assert bed.disk.budget.left_bytes == rows.nbytes


def test_rows_that_wait_when_all_are_cleared_are_not_written_and_those_being_written_are_deleted() -> None:
    with MemoryStore(1 << 20) as store:
        bed = RowBed(store)
        own, other = bed.rows(b"a model"), bed.rows(b"another")
        other.write(b"k" * 32, torch.randn(SHAPE), b"")
        other.flush()
        for number in range(3):
            own.write(bytes([number]) * 32, torch.randn(SHAPE), b"")
        own.clear()
        own.write(b"k" * 32, torch.randn(SHAPE), b"")
        own.flush()

        are_there = [own.read(bytes([number]) * 32, SHAPE, torch.float32) is not None for number in range(3)]
        assert are_there == [False] * 3
        assert own.read(b"k" * 32, SHAPE, torch.float32) is not None
        assert other.read(b"k" * 32, SHAPE, torch.float32) is not None


def test_rows_are_not_read_until_a_deletion_that_failed_was_repeated() -> None:
    rows = torch.randn(SHAPE)
    with MemoryStore(1 << 20) as store:
        own = RowBed(store).rows(b"a model")
        own.write(b"k" * 32, rows, b"")
        own.flush()
        deletes = store.delete
        store.delete = _failing  # type: ignore[method-assign]
        own.clear()
        own.flush()
        assert own.read(b"k" * 32, SHAPE, rows.dtype) is None

        store.delete = deletes  # type: ignore[method-assign]
        own.write(b"l" * 32, rows, b"")
        own.flush()

        assert own.read(b"k" * 32, SHAPE, rows.dtype) is None
        assert own.read(b"l" * 32, SHAPE, rows.dtype) is not None


def test_a_disk_that_failed_gets_no_rows_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with MemoryStore(1 << 20) as store:
        bed = RowBed(store)
        own = bed.rows(b"a model")
        store.put_many = _failing  # type: ignore[method-assign]
        for number in range(MAX_FAILURES + 1):
            own.write(bytes([number]) * 32, torch.randn(SHAPE), b"")
            own.flush()

        assert bed.disk.writing.state is BreakerState.OPEN
        assert caplog.text.count("image rows cannot be written on disk (the disk is broken)") == 1


def _failing(blobs: object) -> list[bytes]:
    raise OSError("the disk is broken")


def test_a_store_that_is_closed_loses_rows_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore(1 << 20)
    own = RowBed(store).rows(b"a model")
    store.close()

    for _ in range(2):
        assert own.read(b"k" * 32, SHAPE, torch.float32) is None
    own.write(b"k" * 32, torch.randn(SHAPE), b"")
    own.clear()
    own.flush()

    assert caplog.text.count("images are encoded again") == 1
