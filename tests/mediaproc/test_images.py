"""Files to pixels: unusual ones are read, crafted ones are refused by name."""

import numpy as np
import pytest
from image_files import crafted, file_of, picture, readable
from PIL import Image

from meshlm.mediaproc.addresses import Refused
from meshlm.mediaproc.images import decoded

WHITE = (255, 255, 255)
MOST = 64_000_000


@pytest.mark.parametrize("name", sorted(readable()))
def test_unusual_files_are_images(name: str) -> None:
    image = decoded(readable()[name], MOST, WHITE)
    assert image.mode == "RGB"
    assert image.size == {"turned": (64, 96), "16 bits": (40, 30), "one pixel": (8, 1)}.get(name, (96, 64))


@pytest.mark.parametrize("name", sorted(crafted()))
def test_crafted_files_are_refused_by_name(name: str) -> None:
    data, words = crafted()[name]
    with pytest.raises(Refused) as refused:
        decoded(data, MOST, WHITE)
    assert words in refused.value.refusal.text


def test_greys_of_16_bits_are_scaled() -> None:
    grey = Image.new("I;16", (4, 4), 0x80FF)
    assert set(np.asarray(decoded(file_of(grey), MOST, WHITE)).flatten().tolist()) == {0x80}


def test_what_is_transparent_has_the_background() -> None:
    clear = Image.new("RGBA", (2, 2), (9, 9, 9, 0))
    assert decoded(file_of(clear), MOST, (1, 2, 3)).getpixel((0, 0)) == (1, 2, 3)
    half = Image.new("RGBA", (2, 2), (0, 0, 0, 128))
    assert decoded(file_of(half), MOST, WHITE).getpixel((0, 0)) == (127, 127, 127)


def test_pixels_are_counted_before_they_are_decoded() -> None:
    with pytest.raises(Refused, match="96 x 64 pixels; at most 6143"):
        decoded(file_of(picture()), 96 * 64 - 1, WHITE)
    assert decoded(file_of(picture()), 96 * 64, WHITE).size == (96, 64)
