"""Audio files of a tone, made with PyAV, and a frontend whose model says what a test wants of audio."""

import asyncio
import io
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from parsing import EOS, VOCAB
from scripted import NUM_PROMPT, STOP, Scripted
from tiny_models import resolved_of, spec_of

from meshlm.protocol.audio import SpeechTokens
from meshlm.protocol.config import Resolved, ServerConfig
from meshlm.protocol.edges.text import Accepted, PositionLogprobs, Submit, TokenLogprob
from meshlm.protocol.edges.token import First
from meshlm.runtime.client.placement import Choice, RowDetails

START, EN, DE, JA, TRANSCRIBE, TRANSLATE, PREVIOUS, NO_TIMES = 10, 11, 12, 13, 20, 21, 22, 200
ZERO = NO_TIMES + 1
SPEECH = SpeechTokens(
    start=START,
    languages={"en": EN, "de": DE, "ja": JA},
    tasks={"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    no_timestamps=NO_TIMES,
    previous=PREVIOUS,
    begin_suppress_tokens=(5, 2),
    seconds=2,
)
ENGLISH = SpeechTokens(start=START, no_timestamps=NO_TIMES, seconds=2)
SPEC = spec_of(vocab_size=VOCAB)
Written = Sequence[tuple[int, str]]  # tokens and their texts


def resolved(speech: SpeechTokens | None = SPEECH, **changes: Any) -> Resolved:
    return resolved_of(SPEC, device="fake", eos_token_ids=EOS, speech=speech, **changes)


def tone(seconds: float, rate: int = 16_000, loud: float = 0.5) -> NDArray[np.float32]:
    found: NDArray[np.float32] = (loud * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)).astype("f4")
    return found


def chunks() -> NDArray[np.float32]:
    """An audio clip of five seconds that is cut into three chunks."""
    found = tone(5.0)
    for second in (1.7, 3.4):
        found[round(second * 16_000) :][:3_200] = 0
    return found


def audio_file(
    samples: NDArray[np.float32], form: str = "wav", codec: str = "pcm_s16le", rate: int = 16_000, channels: int = 1
) -> bytes:
    """The samples, the same in each channel, as a file."""
    target, layout = io.BytesIO(), {1: "mono", 2: "stereo"}[channels]
    with av.open(target, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.layout = layout
        context = stream.codec_context
        frame = av.AudioFrame.from_ndarray(np.tile(samples, (channels, 1)), format="fltp", layout=layout)
        frame.sample_rate = rate
        whole = context.frame_size or None
        resampler = av.AudioResampler(format=context.format.name, layout=layout, rate=rate, frame_size=whole)
        for one in [*resampler.resample(frame), *resampler.resample(None), None]:
            container.mux(stream.encode(one))
    return target.getvalue()


def position(token: int, num_chars: int, logprob: float = -0.5) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(token, logprob, 1, "", b""), num_chars)


class Speaking(Scripted):
    """A Scripted whose model detects `language` and writes `written`, a list of tokens for each chunk; later chunks come first where
    `backwards`."""

    def __init__(self, server: ServerConfig | None = None, speech: SpeechTokens | None = SPEECH) -> None:
        super().__init__(server or ServerConfig(responses_store="off"), resolved(speech))
        self.language = DE
        self.written: Sequence[Written] = [((40, " Hello"), (41, " you."))]
        self.backwards = False
        self.language_fails = False
        self.asked = asyncio.Event()
        self._said = defaultdict[int, asyncio.Event](asyncio.Event)  # by chunk

    def open(self, choices: list[Choice], submit: Submit) -> None:
        super().open(choices, submit)
        self.asked.set()

    async def _say(self, choice: Choice) -> None:
        submit, sink = choice.submit, choice.sink
        sink.accepted(choice, Accepted((choice.handle,), NUM_PROMPT))
        await self.go.wait()
        if submit.sampling.allowed_token_ids:
            if self.language_fails and self.failure is not None:
                sink.failed(choice, *self.failure)
            else:
                self._row(choice, [self.language], "", RowDetails(STOP, [position(self.language, 0)]))
            return
        if self.backwards and choice.index + 1 < len(self.written):
            await self._said[choice.index + 1].wait()
        wants, first = submit.sampling.logprobs >= 0, First(0)
        for place, (token, text) in enumerate(self.written[choice.prompt_index]):
            logprobs = [position(token, len(text))] if wants else None
            self._row(choice, [token], text, RowDetails(None, logprobs, None, first if place == 0 else None))
        if self.failure is not None and not self.language_fails:
            sink.failed(choice, *self.failure)
            return
        self._row(choice, [EOS[0]], "", RowDetails(self.finished, [position(EOS[0], 0)] if wants else None))
        self._said[choice.index].set()
