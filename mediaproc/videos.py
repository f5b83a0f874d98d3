"""Files of videos to frames, by FFmpeg's libraries (PyAV), and animations by Pillow. Called in a child of the sandbox (making.py).

A file comes from whoever may ask, so FFmpeg may use few of its demuxers and decoders: none that opens other files or addresses. The
packets are counted first, without decoding any: which frames are wanted goes by their number. Only these are kept.
"""

import contextlib
import errno
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from meshlm.mediaproc.addresses import refused
from meshlm.mediaproc.images import BROKEN, as_rgb
from meshlm.mediaproc.video_limits import VideoFacts, VideoLimits
from meshlm.runtime.mesh import raw_video

DEMUXERS = ("mov", "matroska", "avi")  # mov: mp4, too; matroska: webm
DECODERS = ("h264", "hevc", "vp8", "vp9", "libvpx", "libvpx-vp9", "av1", "libdav1d", "mpeg4")
OPTIONS = {"format_whitelist": ",".join(DEMUXERS), "codec_whitelist": ",".join(DECODERS), "protocol_whitelist": "none"}
ANIMATIONS = ("GIF", "WEBP", "PNG")
BEGINNINGS = (b"GIF8", b"RIFF", b"\x89PNG")  # of animations; RIFF: AVI, too, which Pillow does not read
WHITE = (255, 255, 255)  # behind what is transparent
DEFAULT_RATE = 24.0  # frames a second, of a file that says nothing
FRAME_S = 0.1  # that a frame of an animation stays where it does not say
MAX_RATE = 1000.0  # frames a second, beyond which a file is not believed
NAMES = "mp4, webm, mkv, mov, avi, and animations as GIF, WebP or PNG"
Frames = NDArray[np.uint8]


class Clip(NamedTuple):
    """The frames that the model is given: uint8[frames, height, width, 3], and the number of each in the whole video."""

    frames: Frames
    indices: list[int]
    facts: VideoFacts


Sample = Callable[[VideoFacts], Sequence[int]]


def decoded(data: bytes, limits: VideoLimits, sample: Sample) -> Clip:
    """Refused. sample: the numbers of the frames that are wanted."""
    if data.startswith(raw_video.MAGIC):
        return _of_script(data, limits)
    reader = _Animation if data.startswith(BEGINNINGS) and data[8:12] != b"AVI " else _File
    with reader(data, limits) as video:
        facts = video.facts
        _check_facts(facts, limits)
        indices = [min(max(int(one), 0), facts.num_frames - 1) for one in sample(facts)]
        _check_frames(len(indices), facts, limits)
        wanted = sorted(set(indices))
        found, count = np.empty((0, 0, 0, 3), np.uint8), 0
        for frame in video.frames(wanted):
            if not count:  # a video that lies on its side is turned
                found = np.empty((len(wanted), *frame.shape), np.uint8)
            if frame.shape != found.shape[1:]:
                raise refused("the video has frames of several sizes")
            found[count] = frame
            count += 1
        if count < len(wanted):
            raise refused(
                f"the video cannot be decoded: it ends before its frame {wanted[count]} of {facts.num_frames}"
            )
    places = {index: place for place, index in enumerate(wanted)}
    frames = found if len(indices) == len(wanted) else found[[places[one] for one in indices]]
    return Clip(frames, indices, facts._replace(height=frames.shape[1], width=frames.shape[2]))


def _check_facts(facts: VideoFacts, limits: VideoLimits) -> None:
    _check_size(facts.width, facts.height, limits)
    if facts.seconds > limits.max_seconds:
        raise refused(f"the video lasts {facts.seconds:.1f} s; at most {limits.max_seconds:g} (--max-video-seconds)")


def _check_size(width: int, height: int, limits: VideoLimits) -> None:
    if not width * height:
        raise refused("the video has no pixels")
    if width * height > limits.max_frame_pixels:
        text = f"the video's frames have {width} x {height} pixels"
        raise refused(f"{text}; at most {limits.max_frame_pixels} (--max-image-pixels)")


def _check_frames(number: int, facts: VideoFacts, limits: VideoLimits) -> None:
    if not number:
        raise refused("the model's processor takes no frame of this video")
    if number > limits.max_frames:
        raise refused(f"{number} frames of the video are wanted; at most {limits.max_frames} (--max-video-frames)")
    if (pixels := number * facts.width * facts.height) > limits.max_pixels:
        text = f"{number} frames of the video have {pixels} pixels together"
        raise refused(f"{text}; at most {limits.max_pixels} (--max-video-pixels)")


def _of_script(data: bytes, limits: VideoLimits) -> Clip:
    """Frames that a script gave as they are."""
    try:
        given = raw_video.unpack(data)
    except ValueError as error:
        raise refused(f"the video cannot be decoded: {error}") from None
    facts = VideoFacts(given.num_frames, given.fps, given.width, given.height)
    _check_facts(facts, limits)
    _check_frames(len(given.indices), facts, limits)
    try:
        pixels = given.pixels()
    except ValueError as error:
        raise refused(f"the video cannot be decoded: {error}") from None
    frames = np.frombuffer(pixels, np.uint8).reshape(len(given.indices), given.height, given.width, 3)
    return Clip(frames, list(given.indices), facts)


class _File:
    """A video that FFmpeg reads."""

    def __init__(self, data: bytes, limits: VideoLimits) -> None:
        import av

        self._av, self._data, self._limits = av, data, limits

    def __enter__(self) -> "_File":
        with self._errors(), self._opened() as container:
            self.facts = _facts(container, self._stream(container))
        return self

    def __exit__(self, *_: object) -> None: ...

    def frames(self, wanted: Sequence[int]) -> Iterator[Frames]:
        with self._errors(), self._opened() as container:
            for frame in _chosen(container.decode(self._stream(container)), wanted):
                if frame.width * frame.height > self.facts.width * self.facts.height:  # before it becomes RGB
                    raise refused("the video has frames of several sizes")
                pixels = frame.to_ndarray(format="rgb24")
                yield np.rot90(pixels, round(frame.rotation / 90) % 4) if frame.rotation else pixels

    def _opened(self) -> Any:
        return self._av.open(io.BytesIO(self._data), options=OPTIONS, metadata_errors="ignore")

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return _refusing(self._av.FFmpegError, ValueError, OverflowError)

    def _stream(self, container: Any) -> Any:
        pictures = (one for one in container.streams.video if not one.disposition & one.disposition.attached_pic)
        if (stream := next(pictures, None)) is None:
            raise refused("there is no video in this file")
        context = stream.codec_context
        if context is None or context.codec.name not in DECODERS:
            name = "unknown" if context is None else context.codec.name
            raise refused(f"videos of the codec {name} are not read; send {NAMES}")
        stream.thread_type, context.thread_count = "NONE", 1
        return stream


def _chosen(frames: Iterable[Any], wanted: Sequence[int]) -> Iterator[Any]:
    """Those of these numbers, which rise. What stands behind the last is not asked for."""
    numbers = set(wanted)
    return (one for place, one in enumerate(itertools.islice(frames, wanted[-1] + 1)) if place in numbers)


def _facts(container: Any, stream: Any) -> VideoFacts:
    """By the file's packets, each of which is a frame."""
    times, number = [], 0
    for packet in container.demux(stream):
        if packet.size:
            number += 1
            times += [packet.pts] if packet.pts is not None else []
    if not number:
        raise refused("there is no video in this file")
    if number < stream.frames:
        raise refused(f"the video is cut off: it has {number} of its {stream.frames} frames")
    rate, lasts = float(stream.average_rate or 0), 0.0
    if number > 1 and times:
        lasts = (max(times) - min(times)) * float(stream.time_base or 0) * number / (number - 1)
    if not 0 < rate <= MAX_RATE:
        rate = number / lasts if lasts > 0 else DEFAULT_RATE
    if lasts > number / rate + 1:  # a rate that its own times belie
        rate = number / lasts
    return VideoFacts(number, min(rate, MAX_RATE), stream.codec_context.width, stream.codec_context.height)


@contextlib.contextmanager
def _refusing(*kinds: type[Exception]) -> Iterator[None]:
    """What a library raises for a damaged file is the file's refusal."""
    try:
        yield
    except kinds as error:
        if getattr(error, "errno", 0) == errno.ENOMEM:
            raise MemoryError from None
        reason = getattr(error, "strerror", "") or error
        raise refused(f"is no video that can be read ({reason}); {NAMES} can"[:300]) from None


class _Animation:
    """An image with several frames."""

    def __init__(self, data: bytes, limits: VideoLimits) -> None:
        self._data, self._limits = data, limits

    def __enter__(self) -> "_Animation":
        Image.MAX_IMAGE_PIXELS = None
        with self._errors(), self._opened() as image:
            width, height = image.size
            _check_size(width, height, self._limits)
            number, seconds = 0, 0.0
            for frame in _drawn(image):  # some say only then how long they stay
                number += 1
                seconds += float(frame.info.get("duration") or 1000 * FRAME_S) / 1000
        self.facts = VideoFacts(number, min(number / seconds, MAX_RATE), width, height)
        return self

    def __exit__(self, *_: object) -> None: ...

    def frames(self, wanted: Sequence[int]) -> Iterator[Frames]:
        with self._errors(), self._opened() as image:
            for frame in _chosen(_drawn(image), wanted):
                yield np.asarray(as_rgb(frame.copy(), WHITE))

    def _opened(self) -> Image.Image:
        try:
            return Image.open(io.BytesIO(self._data), formats=ANIMATIONS)
        except UnidentifiedImageError:
            raise refused(f"is no video that can be read; {NAMES} can") from None

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return _refusing(*BROKEN)


def _drawn(image: Image.Image) -> Iterator[Image.Image]:
    """The frames: each is drawn over the one before."""
    for place in range(getattr(image, "n_frames", 1)):
        image.seek(place)
        image.load()
        yield image
