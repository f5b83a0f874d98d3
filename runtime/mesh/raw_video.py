"""Frames of a video that a script gives as they are, on their way to the media process: packed there, and looked at here before a pixel
is unpacked. Pure. Called by the Python API and the media process."""

import zlib
from typing import Self

import msgspec
from msgspec import Struct

MAGIC = b"MESHLM-FRAMES\n"
LEVEL = 1  # of compression: it goes to a process of this host
MAX_SIDE = 1 << 16


class RawVideo(Struct, frozen=True):
    """uint8[frames, height, width, 3], packed."""

    width: int
    height: int
    indices: tuple[int, ...]  # of each frame, in the whole video
    num_frames: int  # of that
    fps: float
    packed: bytes

    @classmethod
    def of_pixels(
        cls, pixels: bytes, size: tuple[int, int], indices: tuple[int, ...], num_frames: int, fps: float
    ) -> Self:
        return cls(*size, indices, num_frames, fps, zlib.compress(pixels, LEVEL))

    def pixels(self) -> bytes:
        """ValueError where they are not so many."""
        size = len(self.indices) * self.height * self.width * 3
        unpacking = zlib.decompressobj()
        try:
            found = unpacking.decompress(self.packed, size)
        except zlib.error as error:
            raise ValueError(f"its pixels are damaged: {error}") from None
        if len(found) < size or unpacking.decompress(unpacking.unconsumed_tail, 1):
            raise ValueError("it has not as many pixels as it says")
        return found


def pack(video: RawVideo) -> bytes:
    return MAGIC + msgspec.msgpack.encode(video)


def unpack(data: bytes) -> RawVideo:
    """Of data that begins with MAGIC. ValueError."""
    try:
        found = msgspec.msgpack.decode(memoryview(data)[len(MAGIC) :], type=RawVideo)
    except msgspec.DecodeError as error:
        raise ValueError(f"it is damaged: {error}") from None
    sides = 0 < found.width < MAX_SIDE and 0 < found.height < MAX_SIDE
    if not sides or not found.indices or found.num_frames < 1 or not 0 < found.fps <= 1000:
        raise ValueError("its sizes and rates are none")
    if not all(0 <= one < found.num_frames for one in found.indices):
        raise ValueError("its frames are not of the video that it says")
    return found
