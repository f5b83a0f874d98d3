"""A small Whisper behind the whole mesh: what clients get is transformers' text, also when processes die while it is written."""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import small_whisper
import tokenizers
import torch
from numpy.typing import NDArray
from serving import Serving, serving

from meshlm.frontend.speech.audio_files import ranges
from meshlm.protocol.audio import SAMPLE_RATE

pytestmark = pytest.mark.mesh
PATH, LONGEST = "/v1/audio/transcriptions", 40


class Transformers:
    """A folder with a model, and what transformers writes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._theirs = folder, small_whisper.made(folder, begin_suppress_tokens=[7], suppress_tokens=[60])
        self._known: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}

    def tokens(self, samples: NDArray[np.float32], prompt: list[int], most: int = LONGEST) -> list[int]:
        """The greedy text behind a prompt; what is never written, or not first, is not."""
        key = samples.tobytes(), (*prompt, -most)
        if key in self._known:
            return self._known[key]
        found: list[int] = []
        with torch.no_grad():
            states = self._theirs.model.encoder(small_whisper.features_of(samples)).last_hidden_state
            while len(found) < most:
                ids = torch.tensor([prompt + found])
                logits = self._theirs(encoder_outputs=(states,), decoder_input_ids=ids).logits[0, -1]
                logits[[60, 7] if not found else [60]] = -torch.inf
                found.append(int(logits.argmax()))
                if found[-1] == 0:
                    break
        return self._known.setdefault(key, found)

    def text(self, samples: NDArray[np.float32], prompt: list[int]) -> str:
        """What a client gets of it: of each piece, joined."""
        parts = (samples[begin:end] for begin, end in ranges(samples, small_whisper.SECONDS))
        return " ".join(said for part in parts if (said := written(self.tokens(part, prompt))))


def written(tokens: list[int]) -> str:
    """Without special tokens and times."""
    return "".join(f"w{token} " for token in tokens if token >= len(small_whisper.NAMES)).strip()


def wav(samples: NDArray[np.float32]) -> bytes:
    """A file whose samples are float32, so that the model gets the very same."""
    data = samples.astype("<f4").tobytes()
    kind = struct.pack("<HHIIHH", 3, 1, SAMPLE_RATE, 4 * SAMPLE_RATE, 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(kind)) + kind + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Transformers:
    return Transformers(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def server(theirs: Transformers) -> Iterator[Serving]:
    with serving(
        "--device", "cpu", "--cpu-threads", "1", "--served-model-name", "tiny", command=("serve", str(theirs.folder))
    ) as found:
        yield found


def ask(server: Serving, samples: NDArray[np.float32], **fields: str) -> httpx.Response:
    fields = {"language": "en", "max_completion_tokens": str(LONGEST)} | fields
    return httpx.post(f"{server.url}{PATH}", files={"file": ("a.wav", wav(samples))}, data=fields, timeout=300)


def test_its_text_is_transformers(server: Serving, theirs: Transformers) -> None:
    audio = [small_whisper.samples(nth, seconds) for nth, seconds in enumerate((0.7, 1.0, 0.2, 2.6))]
    with ThreadPoolExecutor(len(audio)) as pool:
        answers = list(pool.map(lambda samples: ask(server, samples), audio))
    assert [answer.json()["text"] for answer in answers] == [theirs.text(one, [1, 2, 6, 9]) for one in audio]
    assert answers[3].json()["usage"] == {"type": "duration", "seconds": 3}
    assert len({answer.text for answer in answers}) == 4, "audio make the difference"


def test_openais_client_the_language_and_the_prompt(server: Serving, theirs: Transformers) -> None:
    client, samples = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-"), small_whisper.samples(5)
    found = client.audio.transcriptions.create(
        model="tiny",
        file=("a.wav", wav(samples)),
        response_format="verbose_json",
        extra_body={"max_completion_tokens": 9},
    )
    code = found.language
    token = small_whisper.GENERATION["lang_to_id"][f"<|{code}|>"]
    logits = theirs._theirs(
        input_features=small_whisper.features_of(samples), decoder_input_ids=torch.tensor([[1]])
    ).logits[0, -1]
    assert token == 2 + int(logits[2:5].argmax())
    given = client.audio.transcriptions.create(
        model="tiny", file=("a.wav", wav(samples)), language="de", prompt="w70 w71", temperature=0
    )
    loaded = tokenizers.Tokenizer.from_file(str(theirs.folder / "tokenizer.json"))
    prompt = [8, *loaded.encode(" w70 w71", add_special_tokens=False).ids, 1, 3, 6, 9]
    assert given.text == written(theirs.tokens(samples, prompt, 128 - len(prompt)))
    english = httpx.post(
        f"{server.url}/v1/audio/translations",
        files={"file": ("a.wav", wav(samples))},
        data={"language": "de"},
        timeout=60,
    )  # which OpenAI's package has deprecated
    assert english.json() == {"text": written(theirs.tokens(samples, [1, 3, 5, 9], 124))}


def test_what_it_does_not_serve(server: Serving) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi"}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"):
        assert httpx.post(f"{server.url}{path}", json=body).status_code == 404, path
    refused = ask(server, small_whisper.samples(1), language="xx")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "language")
    assert ask(server, small_whisper.samples(1)).status_code == 200


@pytest.mark.parametrize("role", ["worker", "scheduler", "coordinator", "detokenizer"])
def test_a_death_loses_no_word(role: str, server: Serving, theirs: Transformers) -> None:
    samples = small_whisper.samples(7, 10.0)
    expected = theirs.text(samples, [1, 2, 6, 9])
    fields = {"language": "en", "stream": "true", "max_completion_tokens": str(LONGEST)}
    files = {"file": ("a.wav", wav(samples))}
    deltas: list[str] = []
    done: dict[str, Any] = {}
    with httpx.stream("POST", f"{server.url}{PATH}", files=files, data=fields, timeout=300) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            if event.get("type") == "transcript.text.delta":
                if not deltas:
                    os.kill(server.pid(role), signal.SIGKILL)
                deltas.append(event["delta"])
            elif event.get("type") == "transcript.text.done":
                done = event
    assert "".join(deltas) == done["text"] == expected
    server.wait_for(f"{role}/0 is ready")
    server.forget()


OFFLINE = """
import numpy as np, sys
from meshlm import LLM, SamplingParams
samples = np.fromfile(sys.argv[2], np.float32)
llm = LLM(sys.argv[1], device="cpu")
asked = [
    {"prompt_token_ids": [1, 2, 6, 9], "multi_modal_data": {"audio": (samples, 16000)}},
    {"encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": samples}},
     "decoder_prompt": "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"},
]
for output in llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=12)):
    print(*output.outputs[0].token_ids)
with_times = SamplingParams(temperature=0.0, max_tokens=12, extra_args={"whisper_timestamps": True})
print(*llm.generate(asked[0] | {"prompt_token_ids": [1, 2, 6]}, with_times)[0].outputs[0].token_ids)
try:
    llm.generate("hello")
except Exception as error:
    print(error)
"""


def test_from_python(theirs: Transformers, tmp_path: Path) -> None:
    samples = small_whisper.samples(3)
    samples.tofile(tmp_path / "samples")
    command = [sys.executable, "-P", "-c", OFFLINE, str(theirs.folder), str(tmp_path / "samples")]
    ran = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=300, check=False)
    first, second, timed, refused = ran.stdout.splitlines()
    for line, prompt, times in ((first, [1, 2, 6, 9], False), (second, [1, 3, 6, 9], False), (timed, [1, 2, 6], True)):
        expected = greedy_from_any(theirs, samples, prompt, times=times)
        assert [int(token) for token in line.split()] == expected
    assert "this model transcribes audio" in refused


def greedy_from_any(theirs: Transformers, samples: NDArray[np.float32], prompt: list[int], *, times: bool) -> list[int]:
    """As `Heard.tokens`, where the first token may be any that is written at all. times: by transformers' rules of times, for which
    all ids from 10 on are some, in so small a vocabulary."""
    import transformers
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

    config: Any = transformers.GenerationConfig(eos_token_id=0, bos_token_id=0)
    config.no_timestamps_token_id = 9
    rules: Any = WhisperTimeStampLogitsProcessor(config, len(prompt))
    with torch.no_grad():
        features, found = small_whisper.features_of(samples), list[int]()
        while len(found) < 12 and (not found or found[-1] != 0):
            ids = torch.tensor([prompt + found])
            logits = theirs._theirs(input_features=features, decoder_input_ids=ids).logits[:, -1]
            logits[:, 60] = -torch.inf
            found.append(int((rules(ids, logits) if times else logits).argmax()))
    return found
