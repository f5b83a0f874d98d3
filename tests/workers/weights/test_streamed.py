"""Models in object storage: weights are streamed, and are those of a folder on a disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
import torch
from model_folders import resolve_model
from safetensors.torch import save_file
from small_models import CPU, SMALL, resolved_of_files

from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.runtime.model_files import object_store
from meshlm.runtime.model_files.model_files import ModelFiles
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights import sources
from meshlm.workers.weights.load import load_model

URL = "memory://bucket/models/mine"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL))
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("t")
    (folder / "readme.md").write_text("not fetched")
    return folder


@pytest.fixture
def stored(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The storage, with the folder in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory: Any = fsspec.filesystem("memory")
    for file in folder.iterdir():
        memory.pipe_file(f"/bucket/models/mine/{file.name}", file.read_bytes())
    yield memory
    memory.rm("/bucket", recursive=True)


def load(files: ModelFiles) -> Decoder:
    resolved = msgspec.structs.replace(resolved_of_files(files), weights_url=files.weights_url)
    with torch.inference_mode():
        return load_model(resolved, CPU, 0, lambda done, total: None)


@pytest.mark.parametrize("block", [1 << 10, 16 << 20])
def test_weights_are_those_of_the_folder(
    folder: Path, stored: Any, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are smaller than tensors, and larger ones; storage in memory, and files."""
    monkeypatch.setattr(sources, "BLOCK", block)
    wanted = load(resolve_model(str(folder)))
    for url in (URL, f"file://{folder}"):
        files = resolve_model(url)
        assert (files.name, files.weights_url, files.chat_templates) == (url, url, {"default": "t"})
        assert files.path.parent == tmp_path / "cache" / "meshlm" / "objects"
        there = {file.name for file in files.path.iterdir()}
        assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= there
        assert not {name for name in there if name.endswith((".safetensors", ".md"))}
        for (name, values), found in zip(wanted.named_parameters(), load(files).parameters(), strict=True):
            assert torch.equal(values, found), name


def test_files_that_are_gone_there_are_gone_here(stored: Any) -> None:
    assert resolve_model(URL).chat_templates
    stored.rm("/bucket/models/mine/chat_template.jinja")
    stored.pipe_file("/bucket/models/mine/../../../escaped.json", b"{}")
    files = resolve_model(URL)
    assert not files.chat_templates
    assert not list(files.path.parents[3].rglob("escaped.json"))
    assert resolve_model(str(files.path), load_format="dummy", tokenizer=URL).tokenizer_path == files.path


def test_what_cannot_be_streamed_is_one_line(folder: Path, stored: Any, tmp_path: Path) -> None:
    for url, said in (
        ("memory://bucket/nothing", "memory://bucket/nothing: there is nothing"),
        ("zz://bucket/models", "zz://bucket/models: Protocol not known: zz"),
        ("s3://bucket/models", r"s3://bucket/models: Install s3fs to access S3; pip install 's3fs"),
    ):
        with pytest.raises(ModelFilesError, match=said):
            object_store.fetch(url, str(tmp_path))
    with pytest.raises(ModelFilesError, match=f"--load-format sharded_state: it is not there for {URL}"):
        resolve_model(URL, load_format="sharded_state")
    files = resolve_model(URL)
    name = min(path for path in stored.find("/bucket") if path.endswith(".safetensors"))
    whole = stored.cat_file(name)
    stored.pipe_file(name, whole[:-8])
    with pytest.raises(ModelFilesError, match=r"memory://bucket/models/mine/model-.*cut short"):
        resolve_model(URL)
    with pytest.raises(ProcessFatal, match=r"memory://bucket/models/mine/model-.*cut short"):
        load(files)
    stored.rm(name)
    with pytest.raises(ProcessFatal, match=r"index.json: it lists .* not there"):
        load(files)
    for path in stored.find("/bucket"):
        if ".safetensors" in path:
            stored.rm(path)
    stored.pipe_file("/bucket/models/mine/pytorch_model.bin", b"")
    with pytest.raises(ModelFilesError, match="safetensors are streamed"):
        resolve_model(URL)


def test_blocks_are_read_ahead_and_forgotten(stored: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is asked for once."""
    monkeypatch.setattr(sources, "BLOCK", 1000)
    save_file({f"t{n:02}": torch.full((500,), float(n)) for n in range(20)}, tmp_path / "m.safetensors")
    stored.pipe_file("/bucket/m.safetensors", (tmp_path / "m.safetensors").read_bytes())
    file = object_store.folder_of("memory://bucket/m.safetensors")
    asked: list[int] = []
    read = object_store.RemotePath.read

    def counted(self: object_store.RemotePath, begin: int | None = None, end: int | None = None) -> bytes:
        asked.append((end or 0) - (begin or 0))
        return read(self, begin, end)

    monkeypatch.setattr(object_store.RemotePath, "read", counted)
    for nth, (name, source) in enumerate(sources.streamed((file,))):
        assert name == f"t{nth:02}"
        assert torch.equal(source.whole(), torch.full((500,), float(name[1:])))
    assert sum(asked) <= 2 * 8 + (tmp_path / "m.safetensors").stat().st_size + 2000
