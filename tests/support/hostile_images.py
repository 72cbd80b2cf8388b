"""Files of images that are made to take much memory, and how much memory of a process their preparation takes.

As a program, it prepares each file as the server does, and writes a line of JSON for each: "bombs" or "costly", what
the file is, the growth of the process's peak of resident memory in bytes, and the error. Decoders in C are counted too.
"""

import ctypes
import io
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

MAX_PIXELS = 1 << 22
SIDE = 2048  # of a square image with as many pixels


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_bomb(width: int, height: int, *others: bytes) -> bytes:
    """A PNG of black pixels, which takes a thousandth of them, with *others* as further chunks."""
    rows = zlib.compressobj(9)
    data = b"".join(rows.compress(bytes(width // 8 + 1)) for _ in range(height)) + rows.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = [png_chunk(b"IHDR", header), *others, png_chunk(b"IDAT", data), png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


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


def gif_bomb(width: int, height: int) -> bytes:
    """A GIF of a small canvas, whose first frame is large."""
    frame = b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x08\x04" + bytes(4) + b"\0;"
    return b"GIF89a" + struct.pack("<HHBBB", 40, 30, 0xF7, 0, 0) + bytes(3 * 256) + frame


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def with_scans(jpeg: bytes, num_more: int) -> bytes:
    """A progressive JPEG whose last scan is there *num_more* times more."""
    scan = jpeg.rindex(b"\xff\xda")
    return jpeg[:-2] + jpeg[scan:-2] * num_more + jpeg[-2:]


def bombs() -> Iterator[tuple[str, bytes]]:
    """Files that are refused from their headers, each with what it is."""
    yield "a PNG of 256 million pixels", png_bomb(16_000, 16_000)
    yield "a PNG of 80 million pixels", png_bomb(8_000, 10_000)
    yield "a PNG of 1x100000 pixels", png_bomb(1, 100_000)
    yield "a GIF of a large frame", gif_bomb(20_000, 30_000)
    yield "a WebP of 16 million pixels", saved(Image.new("RGB", (4_000, 4_000)), "WEBP", lossless=True, method=0)
    yield (
        "a WebP whose frame is larger than its canvas",
        (webp_of(b"VP8X", 40, 30)[:30] + webp_of(b"VP8L", 16_000, 16_000)[12:]),
    )
    yield "a JPEG of 30000 scans", with_scans(saved(Image.new("RGB", (40, 30)), "JPEG", progressive=True), 30_000)


def costly_files() -> Iterator[tuple[str, bytes]]:
    """Files that are decoded, in part or as a whole, each with what it is."""
    noise = Image.effect_noise((SIDE, SIDE), 90).convert("CMYK")
    text = png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 20), 9))
    yield "a PNG of 60 compressed texts", png_bomb(40, 30, *[text] * 60)
    yield "a JPEG of 50 scans", with_scans(saved(noise, "JPEG", progressive=True, quality=50), 40)
    yield "a PNG that ends early", saved(Image.radial_gradient("L").resize((SIDE, SIDE)), "PNG")[:-5000]
    yield "a JPEG that ends early", saved(noise, "JPEG", progressive=True, quality=50)[:-50_000]
    yield "a PNG of 16 bits", saved(Image.new("I;16", (SIDE, SIDE), 500), "PNG")
    yield "a WebP", saved(noise.convert("RGB"), "WEBP", quality=50)
    yield "a WebP without loss", saved(noise.convert("RGB"), "WEBP", lossless=True, method=0, quality=0)


def bytes_of(field: str) -> int:
    """A number of bytes in the process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    from vision_models import build_vision, picture

    from kvtier.engine.config import ImagesConfig
    from kvtier.engine.images.families import family_of
    from kvtier.engine.images.image import ImageError
    from kvtier.engine.images.preparer import ImagePreparer
    from kvtier.server.images.image_file import open_image

    seen = build_vision("qwen3_vl")
    family = family_of(seen.model, seen.tokenizer)
    assert family is not None
    preparer = ImagePreparer(seen.model, family, seen.processor, ImagesConfig(max_pixels=MAX_PIXELS))

    def error_of(data: bytes) -> str:
        try:
            preparer.prepare(open_image(data, MAX_PIXELS))
        except ImageError as error:
            return str(error)
        return ""

    for form in ("PNG", "JPEG", "WEBP", "GIF"):  # what is loaded once is not counted
        error_of(saved(picture(1), form))
    for kind, files in (("bombs", bombs()), ("costly", costly_files())):
        for what, data in files:
            ctypes.CDLL(None).malloc_trim(0)  # memory that was freed is not counted as the process's
            Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
            before = bytes_of("VmRSS")
            error = error_of(data)
            print(json.dumps([kind, what, bytes_of("VmHWM") - before, error]))


if __name__ == "__main__":
    main()
