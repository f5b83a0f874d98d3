"""Flags that a speech-to-text model does not go with: refused by name, with what would do."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import small_whisper

from meshlm.protocol.config import NetworkConfig
from meshlm.supervisor.cli import plan
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flag_rules, flags, resolve, rules


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("whisper")
    small_whisper.made(found, begin_suppress_tokens=[7], suppress_tokens=[5, 20])
    return found


def test_what_a_folder_says_of_speech(folder: Path) -> None:
    resolved = resolve.resolve(flags.build({"model": str(folder), "device": "cpu"}, None)).resolved
    assert resolved is not None
    assert resolved.speech is not None
    assert resolved.spec.audio_encoder is not None
    speech = resolved.speech
    assert (speech.start, speech.no_timestamps, speech.previous, speech.seconds) == (1, 9, 8, 1)
    assert speech.languages == {"en": 2, "de": 3, "fr": 4}
    assert speech.tasks == {"translate": 5, "transcribe": 6}
    assert speech.begin_suppress_tokens == (7,)
    assert resolved.spec.audio_encoder.suppress_tokens == (5, 20)
    assert (resolved.max_model_len, resolved.eos_token_ids) == (128, (0,))


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2: one worker has all of Whisper"),
        ({"pipeline_parallel_size": 3}, "--pipeline-parallel-size 3: one worker has all of Whisper"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8: keys and values of the encoder of Whisper"),
        ({"quantization": "fp8"}, "--quantization fp8: it is not there for Whisper"),
        ({"runner": "pooling"}, "--runner pooling: Whisper"),
        ({"grpc": True}, "--grpc: its service takes no audio"),
        ({"compile": "inductor"}, "--compile inductor"),
    ],
)
def test_flags_that_it_does_not_go_with(flag: dict[str, Any], text: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=text):
        resolve.resolve(flags.build({"model": str(folder), "device": "cpu", **flag}, None))


def test_what_a_sound_takes_is_shown(folder: Path) -> None:
    """50 states and 128 tokens: keys and values of 48 numbers in each of three layers."""
    config = resolve.resolve(flags.build({"model": str(folder), "device": "cpu", "kv_cache_memory": 1 << 30}, None))
    said = dict(plan.memory(config))
    assert said["KV cache of a token"].startswith(f"{3 * 2 * 48 * 4} bytes")
    assert said["KV cache of the longest request"] == "0.2 MiB (128 tokens, and 50 encoder states)"
    assert said["KV cache"].endswith(f": {(1 << 30) // (1152 * 178)} requests at their longest")


def test_packages_that_read_audio_are_the_heads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without frontends reads none."""
    given: dict[str, object] = {"model": str(folder), "device": "cpu"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = resolve.resolve(flags.build(given, None))
    with pytest.raises(UsageError, match="packages that read audio are not installed; pip install 'av"):
        rules.check(flag_rules.audio(config))
    rules.check(flag_rules.audio(msgspec.structs.replace(config, network=NetworkConfig(headless=True))))
