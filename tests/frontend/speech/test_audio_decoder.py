"""Files that say more of themselves than there is: FFmpeg's memory is that of a child, which has a limit."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from audio_clips import Speaking, audio_file, tone

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.speech import audio_decoder
from meshlm.frontend.speech.audio_decoder import AudioDecoder
from meshlm.runtime.sandbox.limits import MIB, Limits


def wav_with_metadata(claimed: int) -> bytes:
    """464 bytes, whose list of texts says that one of them has so many bytes."""
    data = bytes(200)
    texts = b"LIST" + struct.pack("<I", claimed) + b"INFO" + b"INAM" + struct.pack("<I", claimed - 12) + b"x" * 200
    form = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16_000, 32_000, 2, 16)
    body = b"WAVE" + form + texts + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.fixture(scope="module")
def decoder() -> Iterator[AudioDecoder]:
    made = AudioDecoder(25 * MIB, 60.0)
    yield made
    made.close()


def peak_mib(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) >> 10


def test_what_is_audio_is_decoded(decoder: AudioDecoder) -> None:
    samples = decoder.decode(audio_file(tone(1.5)))
    assert samples.dtype == np.float32
    assert abs(len(samples) / 16_000 - 1.5) < 0.1
    samples[0] = 1.0  # its own memory
    with pytest.raises(HttpError, match="no audio file that can be read") as refused:
        decoder.decode(b"no audio")
    assert (refused.value.status, refused.value.param) == (400, "file")


async def test_a_size_that_a_file_claims_takes_no_memory_here() -> None:
    """It was two gigabytes of the frontend's."""
    backend = Speaking()
    transport = httpx.ASGITransport(app=backend.app)
    before = peak_mib(os.getpid())
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for claimed in (1_000_000_000, 2_000_000_000):
            files = {"file": ("a.wav", wav_with_metadata(claimed))}
            answer = await client.post("/v1/audio/transcriptions", files=files)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "file"
    assert peak_mib(os.getpid()) - before < 100


def test_time_and_the_end_of_a_child_are_told_apart(decoder: AudioDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "_limits", Limits(cpu_s=0.001, memory_bytes=512 * MIB, stack_bytes=8 * MIB))
    with pytest.raises(HttpError, match=r"cannot be decoded: it takes more than 0.001 s of CPU time") as refused:
        decoder.decode(audio_file(tone(50.0)))
    assert refused.value.status == 400
    monkeypatch.setattr(decoder, "_limits", Limits(cpu_s=9.0, memory_bytes=4 * MIB, stack_bytes=8 * MIB))
    with pytest.raises(HttpError, match=r"more than (4 MiB of memory|8 MiB of stack)") as refused:
        decoder.decode(audio_file(tone(50.0)))
    assert refused.value.status == 400
    monkeypatch.setattr(audio_decoder, "WALL_S", 0.0)
    with pytest.raises(HttpError, match="try again") as busy:
        decoder.decode(audio_file(tone(0.5)))
    assert busy.value.status == 503
