"""Images among the tokens of a prompt, and rows in a cache of limited size."""

import pytest
import torch

from kvtier.engine.images.image import ImageError, PreparedImage, identity_of
from kvtier.engine.images.prompt_images import PromptImages, place_images
from kvtier.engine.images.row_cache import RowCache
from kvtier.engine.images.row_store import MAX_BYTES, RowStore
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.naming.block_hash import MultimodalItem

IMAGE = 9
SHAPE = (2, 3, 4)


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


def test_rows_on_disk_belong_to_one_model_and_have_one_shape() -> None:
    rows = torch.randn(SHAPE)
    with MemoryStore(1 << 20) as store:
        own = RowStore(store, b"a model")
        own.write(b"k" * 32, rows, b"")
        own.close()
        again, other = RowStore(store, b"a model"), RowStore(store, b"another")

        found = again.read(b"k" * 32, SHAPE, rows.dtype)

        assert found is not None
        assert torch.equal(found, rows)
        assert other.read(b"k" * 32, SHAPE, rows.dtype) is None
        assert again.read(b"k" * 32, (2, 3, 5), rows.dtype) is None
        again.close()
        other.close()


def test_rows_that_no_change_of_the_store_takes_are_not_written() -> None:
    with MemoryStore(1 << 30) as store:
        own = RowStore(store, b"a model")
        own.write(b"k" * 32, torch.empty(1, MAX_BYTES // 4 + 1, 1), b"")
        own.close()

        assert store.statistics().num_records == 0


def test_a_store_that_is_closed_loses_rows_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore(1 << 20)
    store.close()
    own = RowStore(store, b"a model")

    for _ in range(2):
        assert own.read(b"k" * 32, SHAPE, torch.float32) is None
    own.write(b"k" * 32, torch.randn(SHAPE), b"")
    own.clear()
    own.close()

    assert caplog.text.count("images are encoded again") == 1
