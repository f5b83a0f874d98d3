"""Whisper with dummy weights on this machine: an encoder's time, a text's, and how many requests at once; transformers beside it.

    python -P benchmarks/speech.py [--sizes tiny base small] [--device cpu] [--tokens 100] [--streams 8] [--json FILE]

Audio are 30 s of noise. `first_s` is a request of one token: sending the file, decoding it, hearing it. `whole_s` has so many tokens,
`real_time` is how many seconds of audio that many requests at once get written down in a second. Of transformers: its encoder, and its
decoder's greedy steps with a cache, in the same process and with as many threads as there are cores; no file, no server.
"""

import argparse
import json
import statistics
import struct
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import harness
from harness import Mesh

SECONDS, RATE = 30, 16_000
SIZES = {"tiny": (384, 4, 6), "base": (512, 6, 8), "small": (768, 12, 12), "medium": (1024, 24, 16)}
SIZES["large-v3"] = (1280, 32, 20)
VOCAB = 51866
TOKENS = {"start": 50258, "en": 50259, "translate": 50359, "transcribe": 50360, "previous": 50362, "no_times": 50364}


def make(size: str, folder: Path) -> dict[str, Any]:
    """The folder's files without weights; its config."""
    import tokenizers

    hidden, layers, heads = SIZES[size]
    config: dict[str, Any] = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": VOCAB,
        "num_mel_bins": 128 if size == "large-v3" else 80,
        "d_model": hidden,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "eos_token_id": 50257,
    }
    for part in ("encoder", "decoder"):
        config |= {f"{part}_layers": layers, f"{part}_attention_heads": heads, f"{part}_ffn_dim": 4 * hidden}
    generation = {
        "decoder_start_token_id": TOKENS["start"],
        "no_timestamps_token_id": TOKENS["no_times"],
        "prev_sot_token_id": TOKENS["previous"],
        "lang_to_id": {"<|en|>": TOKENS["en"]},
        "task_to_id": {"translate": TOKENS["translate"], "transcribe": TOKENS["transcribe"]},
        "suppress_tokens": [50257],  # else noise may end a text at once
        "eos_token_id": 50257,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    words = {f"w{nth}": nth for nth in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return config


def noise(seed: int) -> bytes:
    """A .wav file of float32."""
    data = (0.1 * np.random.default_rng(seed).standard_normal(SECONDS * RATE)).astype("<f4").tobytes()
    kind = struct.pack("<HHIIHH", 3, 1, RATE, 4 * RATE, 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(kind)) + kind + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def transcribe(port: int, seed: int, tokens: int) -> float:
    """Seconds for one request."""
    begun = time.perf_counter()
    answer = httpx.post(
        f"http://127.0.0.1:{port}/v1/audio/transcriptions",
        files={"file": ("noise.wav", noise(seed))},
        data={"language": "en", "max_completion_tokens": str(tokens)},
        timeout=600,
    )
    answer.raise_for_status()
    return time.perf_counter() - begun


def served(folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    with Mesh([str(folder), "--load-format", "dummy", "--device", arguments.device]) as mesh:
        post = partial(transcribe, mesh.port)
        post(0, 2)
        first = statistics.median(post(seed, 1) for seed in range(3))
        whole = statistics.median(post(seed, arguments.tokens) for seed in range(3))
        begun = time.perf_counter()
        with ThreadPoolExecutor(arguments.streams) as pool:
            list(pool.map(lambda seed: post(seed, arguments.tokens), range(arguments.streams)))
        together = time.perf_counter() - begun
    real_time = arguments.streams * SECONDS / together
    return {"first_s": round(first, 3), "whole_s": round(whole, 3), "real_time": round(real_time, 1)}


def of_transformers(config: dict[str, Any], arguments: argparse.Namespace) -> dict[str, float]:
    import torch
    import transformers

    known = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**known)).eval()
    features = torch.randn(1, config["num_mel_bins"], 3000)
    with torch.inference_mode():
        times = []
        for _ in range(4):
            begun = time.perf_counter()
            states = model.model.encoder(features).last_hidden_state
            times.append(time.perf_counter() - begun)
        cache, ids = None, torch.tensor([[TOKENS["start"], TOKENS["en"], TOKENS["transcribe"], TOKENS["no_times"]]])
        begun = time.perf_counter()
        for _ in range(arguments.tokens):
            out = model(encoder_outputs=(states,), decoder_input_ids=ids, past_key_values=cache, use_cache=True)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
        text = time.perf_counter() - begun
    encoder = statistics.median(times[1:])
    return {"encoder_s": round(encoder, 3), "text_s": round(text, 3), "whole_s": round(encoder + text, 3)}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["tiny", "base"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--streams", type=int, default=8)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"device": arguments.device, "tokens": arguments.tokens, "streams": arguments.streams}
    report["sizes"] = {}
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as name:
            config = make(size, Path(name))
            found: dict[str, Any] = {"meshlm": served(Path(name), arguments)}
            if arguments.device == "cpu":
                found["transformers"] = of_transformers(config, arguments)
        report["sizes"][size] = found
        print(json.dumps({size: found}), flush=True)
    harness.keep(arguments.json, report)


if __name__ == "__main__":
    main()
