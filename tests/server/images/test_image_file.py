"""Hostile files are refused from their headers, in little time and memory."""

import io
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import hostile_images
import pytest
from hostile_images import png_bomb, webp_of
from PIL import Image
from vision_models import picture

from kvtier.engine.images.image import ImageError
from kvtier.server.images.image_file import MAX_SCANS, open_image, read_data_url, size_of_webp

MAX_PIXELS = 1 << 24


def saved(form: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture(1, 40, 30).save(file, form, **options)
    return file.getvalue()


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
def test_a_bomb_is_refused(data: bytes) -> None:
    with pytest.raises(ImageError):
        open_image(data, MAX_PIXELS)


@pytest.fixture(scope="module")
def growths() -> dict[str, list[tuple[str, int, str]]]:
    """Prepare hostile files in a process of their own. Return, by kind, the files, their growth and their errors."""
    root = Path(hostile_images.__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "tests" / "support")])
    # Memory of 64 KiB or more is mapped by itself, so that it leaves the process as soon as it is freed.
    settings = {"PYTHONPATH": paths, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, hostile_images.__file__]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True)
    found: dict[str, list[tuple[str, int, str]]] = {"bombs": [], "costly": []}
    for line in done.stdout.splitlines():
        kind, *rest = json.loads(line)
        found[kind].append(tuple(rest))
    return found


def test_no_bomb_makes_the_process_grow(growths: dict[str, list[tuple[str, int, str]]]) -> None:
    assert len(growths["bombs"]) == 7
    for what, growth, error in growths["bombs"]:
        assert error, f"{what} is prepared"
        assert growth < 4 << 20, what


def test_no_file_takes_more_than_32_bytes_a_pixel(growths: dict[str, list[tuple[str, int, str]]]) -> None:
    assert len(growths["costly"]) == 7
    for what, growth, _ in growths["costly"]:
        assert growth < 32 * hostile_images.MAX_PIXELS, what
    assert max(growth for _, growth, _ in growths["costly"]) > 4 * hostile_images.MAX_PIXELS, "nothing is measured"


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
