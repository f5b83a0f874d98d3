"""LongRoPE: the start says which factors are taken, where files have two sets."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from model_folders import CONFIG

from meshlm.supervisor.settings import flags, resolve

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


def said(folder: Path, capsys: pytest.CaptureFixture[str], length: int, **rope: Any) -> str:
    config = {**CONFIG, "rope_scaling": {**LONG, **rope}, "original_max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    given = {"model": str(folder), "device": "cpu", "load_format": "dummy", "max_model_len": length}
    resolve.resolve(flags.build(given, None))
    return capsys.readouterr().err


def test_long_factors_for_all_lengths_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "longrope: with --max-model-len 33 all texts are turned by long_factor" in said(tmp_path, capsys, 33)
    assert "longrope" not in said(tmp_path, capsys, 32)
    assert "longrope" not in said(tmp_path, capsys, 128, long_factor=[1.0] * 8)
