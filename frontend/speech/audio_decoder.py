"""Audio files to samples, each in a child of this process: FFmpeg believes what a file says of itself, and takes memory for that.

Called by routes.py in threads that wait. A file that takes more than its limits is refused by them; what it does to its child, no other
request notices.
"""

from typing import TYPE_CHECKING

import msgspec

from meshlm.frontend.http.errors import HttpError, field_error
from meshlm.protocol.audio import SAMPLE_RATE
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.extras import how_to_install
from meshlm.runtime.sandbox.limits import MIB, ChildDied, Limits
from meshlm.runtime.sandbox.sandbox import NoChild, Sandbox, SandboxFailed

if TYPE_CHECKING:
    from meshlm.runtime.audio_samples import Samples

DECODED, REFUSED = b"+", b"-"  # the first byte of a child's answer
LIBRARY_BYTES = 128 * MIB  # FFmpeg's own
BYTES_A_SAMPLE = 16  # as decoded, joined, looked at and answered
COPIES = 3  # of a file: as it came, whole, and as FFmpeg reads it
STACK_BYTES = 8 * MIB
CPU_S, CPU_SHARE = 10.0, 0.05  # of one core: so much, and so much for each second of audio
WALL_S = 300.0


def not_installed(package: str) -> HttpError:
    """The answer where a package of the extra `audio` is missing, which servers of other models do without."""
    text = f"audio need {package}, which is not installed at the server: {how_to_install('audio')}"
    return HttpError(500, text)


class AudioDecoder:
    """The fork server is started with the first file."""

    def __init__(self, max_bytes: int, max_seconds: float) -> None:
        samples = int(max_seconds * SAMPLE_RATE)
        self._limits = Limits(
            cpu_s=CPU_S + CPU_SHARE * max_seconds,
            memory_bytes=LIBRARY_BYTES + BYTES_A_SAMPLE * samples + COPIES * max_bytes,
            stack_bytes=STACK_BYTES,
        )
        argument = msgspec.json.encode(float(max_seconds))
        self._sandbox = Sandbox("meshlm.frontend.speech.audio_files", argument, "audio")

    def decode(self, data: bytes) -> "Samples":
        """The file's samples; see audio_files.decode. HttpError names `file`."""
        import numpy as np  # which other servers do without

        try:
            answer = self._sandbox.run(data, self._limits, WALL_S)
        except ChildDied as died:
            if died.is_of_the_job:
                raise field_error("file", f"it cannot be decoded: {died.message}") from None
            raise HttpError.of_kind(ErrorKind.OVERLOADED, f"file: {died.message}; try again", "file") from None
        except NoChild as failed:
            raise HttpError.of_kind(ErrorKind.OVERLOADED, f"file: {failed}; try again", "file") from None
        except SandboxFailed as failed:
            raise HttpError.of_kind(ErrorKind.INTERNAL, f"the audio cannot be decoded: {failed}", "file") from None
        if answer[:1] != DECODED:
            raise HttpError(*msgspec.msgpack.decode(answer[1:], type=tuple[int, str, str, str]))
        return np.frombuffer(answer, np.float32, offset=1).copy()

    def close(self) -> None:
        self._sandbox.close()
