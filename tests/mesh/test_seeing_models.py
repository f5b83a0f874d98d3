"""A small model that sees, served whole on the CPU: its answers are transformers' own, and a worker's death changes none of them."""

import os
import signal
from collections.abc import Iterator

import pytest
from image_files import data_url
from image_requests import ask, body, cached, fresh, ids_of, part, stream
from serving import Serving, serving
from small_seer import Seer

pytestmark = pytest.mark.mesh
COUNT = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Seer:
    return Seer(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="module")
def server(model: Seer) -> Iterator[Serving]:
    with serving(str(model.folder), "--max-model-len", "512", "--dtype", "float32") as found:
        yield found


def test_answers_are_transformers_own(model: Seer, server: Serving) -> None:
    first, second = fresh(), fresh((150, 40))
    for files in ((first,), (first, second), (second, first)):
        answer = ask(server, "look ", *(part(data_url(one)) for one in files), " what?", count=COUNT, temperature=0)
        prompt, tokens = ids_of(answer)
        assert tokens == model.expected(prompt, tokens, *files)
    assert cached(ask(server, "look ", part(data_url(first)), " what?", count=COUNT, temperature=0)) > 0


def test_a_worker_that_dies_changes_nothing(model: Seer, server: Serving) -> None:
    image = fresh()
    asked = body("and ", part(data_url(image)), "?", count=64, temperature=0)
    prompt, whole = ids_of(ask(server, "and ", part(data_url(image)), "?", count=64, temperature=0))
    assert whole == model.expected(prompt, whole, image)
    victims = [server.pid("worker")]

    def kill(count: int) -> None:
        if count >= 3 and victims:
            os.kill(victims.pop(), signal.SIGKILL)

    assert stream(server, asked, kill) == whole
    assert not victims
