"""Files of images to pixels, by Pillow. Called in a child of the sandbox (making.py), which has limits of its own.

A file says how many pixels it has before any of them is decoded, and is believed only as far as it is refused by it.
"""

import io
import warnings

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from meshlm.mediaproc.addresses import refused

FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")
BROKEN = (OSError, ValueError, SyntaxError, LookupError, TypeError, ArithmeticError, AttributeError)
"""What Pillow's readers raise for damaged files."""
Image.init()
NAMES = "JPEG, PNG, GIF, WebP, BMP and TIFF"
# As opened -> 8 bits a channel. 16-bit greys are scaled by hand: Pillow would cut them off at 255.
GREYS_16 = ("I;16", "I;16L", "I;16B", "I;16N")
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", *GREYS_16, "I")


def decoded(data: bytes, max_pixels: int, background: tuple[int, int, int]) -> Image.Image:
    """The image in RGB, upright. Refused. background: the colour behind what is transparent."""
    Image.MAX_IMAGE_PIXELS = None  # ours is a limit, and not a warning
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is odd in a file: it is read, or not
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check(image, max_pixels)
                image.load()
                return as_rgb(ImageOps.exif_transpose(image), background)
        except UnidentifiedImageError:
            raise refused(f"is no image that can be read; {NAMES} can") from None
        except BROKEN as error:
            raise refused(f"the image cannot be decoded: {error}"[:300]) from None


def _check(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size
    if not width * height:
        raise refused("the image has no pixels")
    if width * height > max_pixels:
        text = f"the image has {width} x {height} pixels; at most {max_pixels} (--max-image-pixels)"
        raise refused(text)
    # A photo with a preview or another exposure behind it (MPO) is its first image.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise refused("the image has several frames; send one of them as an image of its own")
    if image.mode not in MODES:
        raise refused(f"images of mode {image.mode} are not read; convert it to 8 bits a channel")


def as_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """8 bits a channel. background: the colour behind what is transparent."""
    if image.mode in GREYS_16 or image.mode == "I":
        grey = np.asarray(image).astype(np.int64)
        return Image.fromarray((grey.clip(0, 0xFFFF) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        behind = Image.new("RGBA", image.size, (*background, 255))
        behind.alpha_composite(image.convert("RGBA"))
        return behind.convert("RGB")
    return image.convert("RGB")
