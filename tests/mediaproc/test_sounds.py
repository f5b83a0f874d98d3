"""Items of sounds: what the models' own processors make of clips, how long these may be, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from small_hearer import AUDIO, MELS, SECONDS, Hearer
from sound_files import RATE, clip

from meshlm.architectures.media import media_spec
from meshlm.mediaproc.addresses import Refused
from meshlm.mediaproc.processors import Processor
from meshlm.protocol.media import Modality
from meshlm.protocol.wire.columns import ints


def processor_of(folder: Path) -> Processor:
    spec = media_spec(json.loads((folder / "config.json").read_text()), 32)
    assert spec is not None
    return Processor(str(folder), spec, {})


@pytest.fixture(scope="module")
def hearer(tmp_path_factory: pytest.TempPathFactory) -> Hearer:
    return Hearer(tmp_path_factory.mktemp("sounds") / "model")


def test_a_clip_is_what_the_processor_makes_of_it(hearer: Hearer) -> None:
    item, tensors = processor_of(hearer.folder).made(Modality.AUDIO, clip(1, 0.4), {})
    assert ints(item.replacement) == [AUDIO] * 10
    assert item.is_vector == bytes([1] * 10)
    assert (item.modality, item.placeholder, item.is_uncut) == (Modality.AUDIO, AUDIO, False)
    assert [one.name for one in item.tensors] == ["feature_attention_mask", "input_features"]
    assert tensors[1].shape == (1, MELS, 100 * SECONDS)


def test_what_is_refused(hearer: Hearer) -> None:
    made = processor_of(hearer.folder).made
    with pytest.raises(Refused, match="the audio is too short: no token stands for it"):
        made(Modality.AUDIO, clip(1, 0.005), {})
    with pytest.raises(Refused, match="max_pixels is nothing that this model's processor knows"):
        made(Modality.AUDIO, clip(1), {"max_pixels": 1})


def test_a_clip_is_as_long_as_the_model_hears(hearer: Hearer) -> None:
    processor = processor_of(hearer.folder)
    assert processor.longest_clip(600) == (SECONDS, "all that this model hears of a clip")
    assert processor.longest_clip(1) == (1, "--max-audio-seconds")


def test_a_model_of_another_rate_is_refused(hearer: Hearer, tmp_path: Path) -> None:
    hearer.processor.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "processor_config.json").read_text())
    config["feature_extractor"]["sampling_rate"] = 24_000
    (tmp_path / "processor_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text((hearer.folder / "config.json").read_text())
    with pytest.raises(Refused, match="the model hears 24000 samples a second; only 16000 are supported"):
        processor_of(tmp_path)


def test_windows_of_voxtral(hearer: Hearer, tmp_path: Path) -> None:
    features: Any = transformers.WhisperFeatureExtractor(feature_size=MELS, chunk_length=1)
    transformers.VoxtralProcessor(features, hearer.processor.tokenizer).save_pretrained(tmp_path)
    tower = {"model_type": "voxtral_encoder", "hidden_size": 32, "intermediate_size": 64}
    config = {"architectures": ["VoxtralForConditionalGeneration"], "model_type": "voxtral", "audio_token_id": 24}
    (tmp_path / "config.json").write_text(json.dumps({**config, "audio_config": tower, "text_config": {}}))
    processor = processor_of(tmp_path)
    assert processor.longest_clip(600) == (600, "--max-audio-seconds")
    for seconds, windows in ((0.3, 1), (1.0, 1), (1.0 + 1 / RATE, 2)):
        item, (tensor,) = processor.made(Modality.AUDIO, clip(1, seconds), {})
        assert ints(item.replacement) == [24] * 25 * windows
        assert tensor.shape == (windows, MELS, 100)
