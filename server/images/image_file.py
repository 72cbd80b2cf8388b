"""Decoding of image files from clients, within limits on memory and time."""

import base64
import binascii
import io
import re
from typing import TYPE_CHECKING

from kvtier.engine.images.image import ImageError, plain_line
from kvtier.extras import extra

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# Maximum number of scans of a JPEG. Programs write up to 20. A file of 1 MB can have 30,000 scans without data, each of
# which takes as long to decode as a whole image.
MAX_SCANS = 100
_SCAN = b"\xff\xda"  # marker of a scan; compressed data never contains it
_DATA_URL = re.compile(r"data:([a-z0-9.+/-]*)((?:;[^;,]*)*),", re.IGNORECASE)


def read_data_url(url: str) -> bytes:
    """Return the bytes in a data URL. Raise `ImageError` if *url* is not a data URL in base64."""
    head = _DATA_URL.match(url)
    if head is None or not head[2].lower().endswith(";base64"):
        raise ImageError("the data URL is not written as data:image/png;base64,…; encode the image's file in base64")
    return read_base64(url[head.end() :])


def read_base64(text: str) -> bytes:
    """Return the bytes that *text* encodes. Raise `ImageError` if it is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the image is not base64: {error}") from None


def open_image(data: bytes, max_pixels: int) -> "Image":
    """Return the image in a file, which may have at most *max_pixels* pixels.

    Only the file's header is read. Pixels are decoded when they are needed first.

    Raises:
        ImageError: If the image is too large, or the file is not a PNG, JPEG, WebP or GIF, or its header is damaged.
        MissingExtra: If pillow is not installed.
    """
    with extra("images", "an image in a request"):
        from PIL import Image, UnidentifiedImageError

    if data.count(_SCAN) > MAX_SCANS and data.startswith(b"\xff\xd8"):
        raise ImageError(f"the JPEG has more than {MAX_SCANS} scans; save it again, as a baseline JPEG")
    if (size := size_of_webp(data)) is not None and size[0] * size[1] > max_pixels:
        raise ImageError(f"the image has {size[0]}x{size[1]} pixels, and images.max_pixels is {max_pixels}")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageError("the file is not a PNG, JPEG, WebP or GIF image, or its header is damaged") from None
    except Image.DecompressionBombError:
        raise ImageError("the image has too many pixels; send a smaller image") from None
    except (OSError, ValueError, SyntaxError, ArithmeticError, LookupError, RuntimeError) as error:
        raise ImageError(f"the image's file is damaged: {plain_line(error)}") from None
    if image.width * image.height > max_pixels:
        raise ImageError(f"the image has {image.width}x{image.height} pixels, and images.max_pixels is {max_pixels}")
    return image


def size_of_webp(data: bytes) -> tuple[int, int] | None:
    """Return width and height in the header of a WebP file, None for any other file.

    pillow's decoder allocates memory for all pixels as soon as it opens the file.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    match data[12:16]:
        case b"VP8X":
            return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 ":
            return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
        case _:
            return None
