"""Hostile files are refused from their headers, in little time and memory."""

import io
import struct
import tracemalloc
import zlib

import pytest
from PIL import Image
from vision_models import picture

from kvtier.engine.images.image import ImageError
from kvtier.server.images.image_file import MAX_SCANS, open_image, read_data_url, size_of_webp

MAX_PIXELS = 1 << 24


def saved(form: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture(1, 40, 30).save(file, form, **options)
    return file.getvalue()


def png_bomb(width: int, height: int) -> bytes:
    """A PNG of black pixels, which takes a thousandth of them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compressobj(9)
    data = b"".join(rows.compress(bytes(width // 8 + 1)) for _ in range(height)) + rows.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def webp_of(kind: bytes, width: int, height: int) -> bytes:
    """The header of a WebP file."""
    match kind:
        case b"VP8X":
            body = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        case b"VP8L":
            body = b"\x2f" + ((width - 1) | (height - 1) << 14).to_bytes(4, "little") + bytes(5)
        case _:
            body = b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height)
    return b"RIFF" + struct.pack("<I", 100) + b"WEBP" + kind + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "data",
    [
        png_bomb(16_000, 16_000),
        png_bomb(60_000, 4_000),
        webp_of(b"VP8X", 16_000, 16_000),
        webp_of(b"VP8L", 16_000, 16_000),
        webp_of(b"VP8 ", 16_000, 16_000),
        b"GIF89a" + struct.pack("<HH", 60_000, 60_000) + bytes(20),
    ],
)
def test_a_bomb_is_refused_without_memory_for_its_pixels(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ImageError):
            open_image(data, MAX_PIXELS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 4 * len(data) + (4 << 20)


def test_a_jpeg_of_many_scans_is_refused() -> None:
    data = saved("JPEG", progressive=True)
    assert open_image(data, MAX_PIXELS).size == (40, 30)
    scan = data.rindex(b"\xff\xda")

    with pytest.raises(ImageError, match=f"more than {MAX_SCANS} scans"):
        open_image(data[:-2] + data[scan:-2] * MAX_SCANS + data[-2:], MAX_PIXELS)


@pytest.mark.parametrize("form", ["BMP", "TIFF", "PPM", "ICO"])
def test_only_kinds_of_files_that_clients_send_are_read(form: str) -> None:
    with pytest.raises(ImageError, match="not a PNG, JPEG, WebP or GIF"):
        open_image(saved(form), MAX_PIXELS)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_file_that_ends_early_at_any_byte_is_an_image_error_or_an_image(form: str) -> None:
    data = saved(form)
    for end in [*range(0, 64), *range(64, len(data), max(1, len(data) // 60))]:
        try:
            image = open_image(data[:end], MAX_PIXELS)
        except ImageError:
            continue
        assert image.size == (40, 30)


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 50}, {"lossless": True, "exif": b"Exif\0\0"}])
def test_the_size_of_a_webp_is_that_of_pillow(options: dict[str, object]) -> None:
    assert size_of_webp(saved("WEBP", **options)) == (40, 30)
    assert size_of_webp(saved("PNG")) is None


@pytest.mark.parametrize(
    "url", ["data:image/png;base64,aGk=", "DATA:;base64,aGk=", "data:image/png;name=a.png;base64,aGk="]
)
def test_data_urls_are_read(url: str) -> None:
    assert read_data_url(url) == b"hi"


@pytest.mark.parametrize(
    "url", ["", "aGk=", "data:image/png,hi", "data:;base64", "data:;base64,a", "data:;base64,a b="]
)
def test_other_texts_are_no_data_urls(url: str) -> None:
    with pytest.raises(ImageError):
        read_data_url(url)


def test_an_image_of_pillow_is_not_decoded_yet() -> None:
    image = open_image(saved("PNG"), MAX_PIXELS)

    assert isinstance(image, Image.Image)
    assert getattr(image, "fp", None) is not None
