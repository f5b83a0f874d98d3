"""A request that kills whichever process has it in hand is refused after its second death, by name; the mesh and all others go on."""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fake_answers import complete, reference
from poison_plugin import FAILS, KILLS, POISON, install
from serving import Serving, serving
from waiting import until

pytestmark = pytest.mark.mesh
FLAGS = (
    "--device",
    "fake",
    "--fake-step-ms",
    "5",
    "--max-model-len",
    "4096",
    "--frontends",
    "1",
    "--detokenizers",
    "1",
)
ATTACKS = 4  # of which each costs two deaths or three: more than --max-restarts within a minute
COUNT = 700


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with pytest.MonkeyPatch.context() as patch:
        site = install(tmp_path_factory.mktemp("poison"))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
        with serving(*FLAGS) as found:
            yield found


def deaths(server: Serving, role: str) -> int:
    return sum(process["restarts"] for process in server.status()["processes"] if process["role"] == role)


def attack(server: Serving, prompt: list[int]) -> dict[str, Any]:
    """The error that the poison gets in the end; a client whose connection breaks asks again."""
    answers: list[httpx.Response] = []

    def is_answered() -> bool:
        with contextlib.suppress(httpx.TransportError):
            answers.append(
                httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, "max_tokens": 4}, timeout=300)
            )
        return bool(answers) and answers[-1].status_code != 503

    until(is_answered, 60)
    assert answers[-1].status_code == 400, answers[-1].text
    found: dict[str, Any] = answers[-1].json()["error"]
    return found


@pytest.mark.parametrize("what", KILLS)
def test_a_poison_is_refused_and_its_neighbours_finish(server: Serving, what: str) -> None:
    role = what.partition(" ")[0]
    before = deaths(server, role)
    neighbours = [[40 + number] for number in range(0 if role == "frontend" else 6)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(complete, server, prompt, COUNT) for prompt in neighbours]
        for number in range(ATTACKS):
            error = attack(server, [POISON, KILLS.index(what), number])
            assert error["type"] == "poison_request_error"
            assert f"its {role}" in error["message"], error
        for prompt, one in zip(neighbours, asked, strict=True):
            assert one.result(timeout=300)["choices"][0]["token_ids"] == reference(prompt, COUNT)
    assert 2 * ATTACKS <= deaths(server, role) - before <= 3 * ATTACKS
    assert complete(server, [50, 51], 5)["choices"][0]["token_ids"] == reference([50, 51], 5), "the mesh lives"


def test_a_step_that_fails_costs_one_request(server: Serving) -> None:
    """Its neighbours' tokens are computed again, and no process dies."""
    before = deaths(server, "worker")
    neighbours = [[60 + number] for number in range(6)]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(complete, server, prompt, COUNT) for prompt in neighbours]
        for number in range(3):
            body = {"prompt": [POISON, FAILS, number], "max_tokens": 4}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
            assert answer.status_code == 500, answer.text
            assert answer.json()["error"]["message"] == "the model failed: IndexError: a row's parameters"
        for prompt, one in zip(neighbours, asked, strict=True):
            assert one.result(timeout=300)["choices"][0]["token_ids"] == reference(prompt, COUNT)
    assert deaths(server, "worker") == before
