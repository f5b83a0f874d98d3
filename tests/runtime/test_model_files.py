"""The sampling defaults of requests that say nothing: of the model, of a folder, of a flag."""

import json
from pathlib import Path

import pytest

from meshlm.runtime.model_files import ModelFilesError, generation_defaults

OF_MODEL: dict[str, float | int] = {"temperature": 0.6, "top_k": 20}


def test_whose_defaults(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.5, "max_new_tokens": 9, "do_sample": True}))
    assert generation_defaults(OF_MODEL, "auto", "") == OF_MODEL
    assert generation_defaults(OF_MODEL, "vllm", "") == generation_defaults(OF_MODEL, "meshlm", "") == {}
    assert generation_defaults(OF_MODEL, str(tmp_path), "") == {"top_p": 0.5, "max_tokens": 9}
    changed = generation_defaults(OF_MODEL, "auto", '{"temperature": 0, "max_new_tokens": 7}')
    assert changed == {"temperature": 0, "top_k": 20, "max_tokens": 7}


@pytest.mark.parametrize("override", ["{", "[]", '{"temperatur": 1}', '{"temperature": "hot"}', '{"top_k": true}'])
def test_what_is_no_default_is_refused(override: str) -> None:
    with pytest.raises(ModelFilesError, match="--override-generation-config: "):
        generation_defaults(OF_MODEL, "auto", override)


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelFilesError, match="--generation-config"):
        generation_defaults(OF_MODEL, "/nowhere", "")
