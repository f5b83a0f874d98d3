"""A small model that sees, served whole on the CPU: its answers are transformers' own, and a worker's death changes none of them."""

import json
import os
import signal
from collections.abc import Iterator

import httpx
import pytest
from image_files import data_url
from image_requests import LIMIT_S, ask, body, cached, fresh, ids_of, part, stream
from serving import Serving, serving
from small_seer import Seer
from waiting import until

from meshlm.detokenizer.attempts import MEDIA_GONE
from meshlm.protocol.media import DIGEST_BYTES
from meshlm.runtime.process.shared_memory import folder_of

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


def test_an_image_whose_file_has_vanished_ends_its_own_request_with_an_error(model: Seer, server: Serving) -> None:
    """A worker that dies would need it again. Later the same image is read anew."""
    image, victims, files = fresh(), [server.pid("worker")], folder_of(server.run_dir)
    asked = {**body("and ", part(data_url(image)), "?", count=300, temperature=0), "stream": True}
    errors, count = list[str](), 0
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=asked, timeout=LIMIT_S) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {}
            errors += [event["error"]["message"]] if "error" in event else []
            count += sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))
            if count >= 3 and victims:
                for path in files.iterdir():
                    if len(path.name) == 2 * DIGEST_BYTES:
                        path.unlink()
                os.kill(victims.pop(), signal.SIGKILL)
    assert count < 300
    (error,) = errors
    assert "the image's tensors cannot be read" in error or error == MEDIA_GONE
    text = ask(server, "text alone", count=COUNT, temperature=0)
    assert text.status_code == 200

    def is_read_anew() -> bool:
        answer = ask(server, "now ", part(data_url(image)), count=COUNT, temperature=0)
        if answer.status_code != 200:
            return False
        prompt, tokens = ids_of(answer)
        assert tokens == model.expected(prompt, tokens, image)
        return True

    until(is_read_anew, limit_s=60)


def test_vectors_of_conversations_with_images_are_transformers_own(model: Seer) -> None:
    first, second = fresh(), fresh((150, 40))
    flags = ("--max-model-len", "512", "--dtype", "float32", "--runner", "pooling")
    with serving(str(model.folder), *flags) as server:
        for files in ((), (first,), (second, first)):
            messages = body("look ", *(part(data_url(one)) for one in files), " what?")["messages"]
            asked = {"messages": messages, "add_generation_prompt": False}
            answers = [
                httpx.post(f"{server.url}{path}", json=asked, timeout=LIMIT_S)
                for path in ("/v1/embeddings", "/tokenize")
            ]
            assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
            vector = answers[0].json()["data"][0]["embedding"]
            expected = model.embedding(answers[1].json()["tokens"], *files)
            assert vector == pytest.approx(expected, abs=2e-4)
