"""Models of each kind that the registry knows answer through the whole mesh, with small random weights.

tests/workers/models/test_families.py has every name of the registry, without processes; test_whisper.py the one that transcribes.
"""

from pathlib import Path
from typing import Any

import httpx
import pytest
from family_models import folder_of
from serving import Serving, serving

from meshlm.architectures.family import Family, Serves
from meshlm.architectures.registry import families

pytestmark = pytest.mark.mesh
FLAGS = ("--device", "cpu", "--cpu-threads", "1", "--dtype", "float32", "--kv-cache-memory", "64M")


def serving_what(*wanted: Serves) -> dict[str, Family]:
    return {name: family for name, family in families().items() if family.serves in wanted}


def one_of_each(names: dict[str, list[str]]) -> list[str]:
    """One name of each list: the first, the second, the third, so that not all are of the same family."""
    return [found[nth % len(found)] for nth, (_, found) in enumerate(sorted(names.items()))]


def text_families() -> list[str]:
    """One name for each class that computes them."""
    of_class: dict[str, list[str]] = {}
    for name, family in serving_what(Serves.TEXT).items():
        of_class.setdefault(family.model, []).append(name)
    return one_of_each(of_class)


def vector_families() -> list[str]:
    """One name for each module that computes them, and for all that encoders and decoders give."""
    of_module: dict[str, list[str]] = {}
    of_task: dict[str, list[str]] = {}
    for name, family in serving_what(Serves.VECTORS, Serves.CLASSES, Serves.TOKEN_CLASSES).items():
        module, _, _ = family.model.partition(":")
        of_module.setdefault(module, []).append(name)
        of_task.setdefault(f"{module.endswith('bert')} {family.serves}", []).append(name)
    return sorted({*one_of_each(of_module), *one_of_each(of_task)})


def answer_of(server: Serving, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def starting_line(server: Serving) -> str:
    return next(line for line in server.lines if "starting " in line)


@pytest.mark.parametrize("architecture", text_families())
def test_a_completion(architecture: str, tmp_path: Path) -> None:
    folder = str(folder_of(architecture, tmp_path))
    with serving(folder, *FLAGS, "--load-format", "dummy", "--max-model-len", "64") as server:
        found = answer_of(server, "/v1/completions", prompt="hello", max_tokens=3, ignore_eos=True)
        assert "completions" not in starting_line(server)
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (5, 3)


@pytest.mark.parametrize("architecture", vector_families())
def test_a_vector(architecture: str, tmp_path: Path) -> None:
    folder = str(folder_of(architecture, tmp_path))
    with serving(folder, *FLAGS, "--load-format", "dummy", "--max-model-len", "64") as server:
        (found,) = answer_of(server, "/pooling", input="hello")["data"]
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "hello"}, timeout=300)
        assert "it gives vectors (" in starting_line(server)
    assert len(found["data"]) > 0
    assert refused.status_code == 404


def test_families_that_transcribe_have_a_test_of_their_own() -> None:
    assert list(serving_what(Serves.TRANSCRIPTIONS)) == ["WhisperForConditionalGeneration"]
