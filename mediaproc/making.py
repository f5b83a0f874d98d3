"""A client's file to tensors in a file, in a child of the media process that may die of it: the sandbox's target (runtime/sandbox).

`make` runs once, in the fork server: it loads the model's processor, which takes seconds. Each child then makes one item.
"""

import errno
import resource
import warnings
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from meshlm.mediaproc.addresses import Refused, refused
from meshlm.mediaproc.events import TOO_LARGE, Refusal
from meshlm.mediaproc.sampling import Sampling
from meshlm.mediaproc.video_limits import VideoLimits
from meshlm.protocol.media import MediaItem, Modality
from meshlm.protocol.media_spec import MediaSpec
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.sandbox.fork_server import Handle, answering


class Settings(Struct, frozen=True):
    """The same for all items."""

    folder: str  # of the model
    spec: MediaSpec
    kwargs: dict[str, Any]  # --mm-processor-kwargs
    background: tuple[int, int, int]
    max_pixels: int
    max_audio_seconds: float
    max_file_bytes: int
    video: VideoLimits
    max_model_len: int
    sampling: Sampling


class Order(Struct, frozen=True):
    """A file of a client, where its tensors are to be written, and the request's mm_processor_kwargs."""

    modality: Modality
    data: bytes
    part: str
    kwargs_json: bytes = b""


class Outcome(Struct, frozen=True):
    """The item, and the bytes of its file; or why there is none."""

    item: MediaItem | None = None
    num_bytes: int = 0
    refusal: Refusal | None = None


def make(argument: bytes) -> Handle:
    warnings.simplefilter("ignore")  # of the libraries, about models' files
    settings = msgspec.json.decode(argument, type=Settings)
    try:
        work = _Maker(settings)
    except Exception as error:  # whoever asks is told; the mesh serves texts all the same
        refusal = error.refusal if isinstance(error, Refused) else None
        text = f"the model's processor cannot be loaded: {type(error).__name__}: {error}"[:500]
        failed = msgspec.msgpack.encode(Outcome(refusal=refusal or Refusal(text, ErrorKind.INTERNAL)))
        return answering(lambda _: failed)
    return answering(work)


class _Maker:
    def __init__(self, settings: Settings) -> None:
        from meshlm.mediaproc.processors import Processor  # with torch and transformers: here alone

        self._settings = settings
        self._processor = Processor(settings.folder, settings.spec, settings.kwargs, settings.max_model_len)

    def __call__(self, job: bytes) -> bytes:
        try:
            return msgspec.msgpack.encode(self._made(msgspec.msgpack.decode(job, type=Order)))
        except Refused as error:
            return msgspec.msgpack.encode(Outcome(refusal=error.refusal))

    def _made(self, order: Order) -> Outcome:
        settings = self._settings
        most = settings.max_file_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        kwargs = msgspec.json.decode(order.kwargs_json, type=dict[str, Any]) if order.kwargs_json else {}
        item, tensors = self._processor.made(order.modality, self._decoded(order, kwargs), kwargs)
        try:
            with open(order.part, "xb") as file:
                for place, tensor in zip(item.tensors, tensors):
                    file.seek(place.offset)
                    file.write(tensor.data)
                size = file.tell()
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise Refused(TOO_LARGE) from None
            text = f"there is no room for it in shared memory: {error.strerror}"
            raise Refused(Refusal(text, ErrorKind.OVERLOADED)) from None
        return Outcome(item, size)

    def _decoded(self, order: Order, kwargs: dict[str, Any]) -> Any:
        """What the processor takes: each modality has a reader. Refused."""
        settings = self._settings
        match order.modality:
            case Modality.IMAGE:
                from meshlm.mediaproc import images  # with Pillow

                return images.decoded(order.data, settings.max_pixels, settings.background)
            case Modality.VIDEO:
                from meshlm.mediaproc import videos  # with PyAV and Pillow

                sample = partial(self._processor.indices, asked=settings.sampling, kwargs=kwargs)
                return videos.decoded(order.data, settings.video, sample)
            case Modality.AUDIO:
                from meshlm.mediaproc import sounds  # with PyAV

                return sounds.decoded(order.data, *self._processor.longest_clip(settings.max_audio_seconds))
            case _:
                raise refused(f"{order.modality} is not read")
