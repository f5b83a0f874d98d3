"""Files of images for tests, plain and crafted."""

import base64
import io
import struct
import zlib
from functools import cache
from typing import Any

from PIL import Image


def picture(seed: int = 1, size: tuple[int, int] = (96, 64), mode: str = "RGB") -> Image.Image:
    """An image that differs from those of other seeds."""
    image = Image.new("RGB", size, (seed * 37 % 256, seed * 91 % 256, seed * 53 % 256))
    for x in range(0, size[0], 8):
        image.putpixel((x, (x * seed) % size[1]), (255, 255, 255))
    return image.convert(mode)


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    found = io.BytesIO()
    image.save(found, form, **options)
    return found.getvalue()


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def chunk(name: bytes, data: bytes) -> bytes:
    """Of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_bomb(width: int, height: int, depth: int = 8, color: int = 2) -> bytes:
    """A PNG that says it has so many pixels, and has those of its first rows in a few bytes."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    rows = zlib.compress(bytes(1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def text_bomb() -> bytes:
    """A PNG whose comment is a hundred megabytes of zeros when it is unpacked."""
    whole = file_of(picture())
    comment = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(100 << 20), 9))
    return whole[:33] + comment + whole[33:]


@cache
def crafted() -> dict[str, tuple[bytes, str]]:
    """Files that are refused, by name, each with words of the refusal."""
    png, jpeg = file_of(picture()), file_of(picture(), "JPEG")
    frames = [picture(seed, mode="P") for seed in range(1, 40)]
    several = {"save_all": True, "append_images": frames}
    unread, broken, animated = "is no image that can be read", "cannot be decoded", "has several frames"
    return {
        "nothing": (b"", unread),
        "text": (b"<!doctype html><p>hello", unread),
        "svg": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', unread),
        "pdf": (b"%PDF-1.7\n" + png, unread),
        "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", unread),
        "ppm": (b"P6 2 2 255\n" + bytes(12), unread),
        "magic alone": (b"\x89PNG\r\n\x1a\n", unread),
        "half a png": (png[: len(png) // 2], broken),
        "half a jpeg": (jpeg[: len(jpeg) // 2], broken),
        "jpeg's head": (jpeg[:20], unread),
        "flipped bytes": (png[:60] + bytes(byte ^ 0x55 for byte in png[60:]), broken),
        "pixels": (png_bomb(50_000, 50_000), "50000 x 50000 pixels"),
        "more pixels": (png_bomb(2_000_000_000, 1), "pixels"),
        "no pixels": (png_bomb(0, 10), ""),
        "rows are missing": (png_bomb(4_000, 4_000), broken),
        "deep bomb": (png_bomb(60_000, 60_000, 16, 6), "60000 x 60000 pixels"),
        "comment": (text_bomb(), ""),
        "gif of frames": (file_of(picture(mode="P"), "GIF", **several), animated),
        "webp of frames": (file_of(picture(), "WEBP", **several), animated),
        "png of frames": (file_of(picture(), "PNG", **several), animated),
        "tiff of pages": (file_of(picture(), "TIFF", save_all=True, append_images=[picture(2)]), animated),
        "floats": (file_of(picture(mode="F"), "TIFF"), "images of mode F are not read"),
    }


@cache
def readable() -> dict[str, bytes]:
    """Files of unusual forms that are images all the same."""
    turned = Image.Exif()
    turned[0x0112] = 6
    grey = Image.new("I;16", (40, 30), 0x8000)
    return {
        "cmyk": file_of(picture(mode="CMYK"), "JPEG"),
        "palette": file_of(picture(mode="P")),
        "transparent palette": file_of(picture(mode="P"), transparency=0),
        "alpha": file_of(picture(mode="RGBA")),
        "grey and alpha": file_of(picture(mode="LA")),
        "bits": file_of(picture(mode="1")),
        "16 bits": file_of(grey),
        "turned": file_of(picture(), "JPEG", exif=turned),
        "one frame": file_of(picture(mode="P"), "GIF"),
        "progressive": file_of(picture(), "JPEG", progressive=True),
        "webp": file_of(picture(), "WEBP"),
        "bmp": file_of(picture(), "BMP"),
        "tiff": file_of(picture(), "TIFF"),
        "polyglot": file_of(picture()) + b"PK\x05\x06" + bytes(18) + b"<script>alert(1)</script>",
        "one pixel": file_of(picture(size=(8, 1))),
    }
