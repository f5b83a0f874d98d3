"""Files of audio to samples, by PyAV. Called in a child of the sandbox (making.py), which has limits of its own."""

from meshlm.mediaproc.addresses import refused
from meshlm.runtime import audio_samples
from meshlm.runtime.audio_samples import AudioRefused, Samples
from meshlm.runtime.extras import how_to_install


def decoded(data: bytes, max_seconds: float, limit: str) -> Samples:
    """One channel at SAMPLE_RATE. Refused. limit: what says that it may have so many seconds."""
    try:
        return audio_samples.decode(data, max_seconds, limit)
    except ImportError:
        text = f"audio needs a package that is not installed at the server (av): {how_to_install('audio')}"
        raise refused(text) from None
    except AudioRefused as error:
        raise refused(str(error)) from None
