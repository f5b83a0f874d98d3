"""A model in several .gguf files, as llama.cpp splits them, is the model in one; parts that do not fit together are named."""

from pathlib import Path

import pytest
import torch
from gguf_models import write_gguf
from model_folders import resolve_model

from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.workers.weights.sources import sources

KINDS = {"q_proj": "Q4_K", "down_proj": "Q6_K"}
CPU = torch.device("cpu")


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write_gguf(tmp_path / "m.gguf", KINDS, each=8)
    found = sorted(tmp_path.glob("m-*.gguf"))
    assert [file.name for file in found] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return found


def test_parts_are_the_whole(tmp_path: Path, parts: list[Path]) -> None:
    whole = tmp_path / "whole" / "m.gguf"
    whole.parent.mkdir()
    write_gguf(whole, KINDS)
    files = [resolve_model(str(path)) for path in (whole, parts[0], tmp_path)]  # a folder whose one model it is
    assert files[0].spec == files[1].spec == files[2].spec
    assert files[1].path == files[2].path == parts[0]
    tensors = [
        {name: source.whole() for name, source in sources(found.path, "gguf", found.spec, CPU, 0)} for found in files
    ]
    assert tensors[0].keys() == tensors[1].keys()
    for name, values in tensors[0].items():
        assert torch.equal(values, tensors[1][name]), name


def test_parts_that_do_not_fit_are_named(tmp_path: Path, parts: list[Path]) -> None:
    first, second, third = parts
    with pytest.raises(ModelFilesError, match=r"00002-of-00003.gguf: part 2 of 3 of a model; give the first"):
        resolve_model(str(second))
    kept = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelFilesError, match=r"00002-of-00003.gguf: it is not part 2 of 3"):
        resolve_model(str(first))
    second.write_bytes(kept[:-64])
    spec = resolve_model(str(first)).spec
    with pytest.raises(ProcessFatal, match=r"00002-of-00003.gguf: .*cut short"):
        next(sources(first, "gguf", spec, CPU, 0))
    second.unlink()
    with pytest.raises(ModelFilesError, match=r"00002-of-00003.gguf: not a readable GGUF file"):
        resolve_model(str(first))
    lone = tmp_path / "lone.gguf"
    first.rename(lone)
    with pytest.raises(ModelFilesError, match=r"the first of 3 files; their names must end in -00001-of-00003.gguf"):
        resolve_model(str(lone))
