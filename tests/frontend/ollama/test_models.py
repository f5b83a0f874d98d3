"""What Ollama's clients are told of the model."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from ollama_site import SERVER, ask
from parsing import RESOLVED
from scripted import Scripted

from meshlm.frontend.ollama import models, schema
from meshlm.protocol.config import MeshConfig


async def test_lists(backend: Scripted) -> None:
    (listed,) = msgspec.json.decode((await ask(backend, "/api/tags")).content, type=schema.Tags).models
    (loaded,) = msgspec.json.decode((await ask(backend, "/api/ps")).content, type=schema.RunningList).models
    assert (listed.name, loaded.model, loaded.context_length) == ("tiny", "tiny", RESOLVED.max_model_len)
    assert listed.digest == loaded.digest
    assert len(listed.digest) == 64


async def test_what_a_model_is(backend: Scripted) -> None:
    for name in ("model", "name"):
        answer = await ask(backend, "/api/show", {"model": "", name: "tiny:latest"})
        shown = msgspec.json.decode(answer.content, type=schema.Shown)
        family = shown.model_info["general.architecture"]
        assert shown.model_info[f"{family}.context_length"] == RESOLVED.max_model_len
        assert shown.capabilities == ["completion", "tools", "thinking"]
    assert (await ask(backend, "/api/show", {"model": ""})).status_code == 400
    assert (await ask(backend, "/api/show", {"model": "other"})).status_code == 404


async def test_pulls(backend: Scripted) -> None:
    assert (await ask(backend, "/api/pull", {"model": "tiny"})).json() == {"status": "success"}
    answer = await ask(backend, "/api/pull", {"model": "other"})
    assert (answer.status_code, "meshlm serve" in answer.json()["error"]) == (404, True)
    answer = await ask(backend, "/api/delete", {})
    assert (answer.status_code, "makes none" in answer.json()["error"]) == (404, True)


async def test_that_it_runs(backend: Scripted) -> None:
    assert (await ask(backend, "/")).text == "Ollama is running"
    version = (await ask(backend, "/api/version")).json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # the oldest that editors take


@pytest.mark.parametrize("is_folder", [True, False])
def test_sizes_are_those_of_the_weights_files(tmp_path: Path, is_folder: bool) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x" * 100)
    (tmp_path / "tokenizer.json").write_bytes(b"x" * 50)
    resolved = replace(RESOLVED, model_path=str(tmp_path if is_folder else file), device="cuda")
    assert models.tags(["a", "b"], resolved).models[1].size == 100
    assert models.running(["a"], resolved).models[0].size_vram == 100


def test_what_a_model_can() -> None:
    assert models.capabilities(MeshConfig(resolved=RESOLVED)) == ["completion"]
    assert models.capabilities(MeshConfig(resolved=RESOLVED, server=SERVER)) == ["completion", "tools", "thinking"]
