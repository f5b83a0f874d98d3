"""Ranks that change their weights one after another: others serve meanwhile, each answer is of one version, and deaths end in one."""

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from changing_weights import Models, kill, pinned, post, three_models, update, versions, write
from serving import Serving, serving
from split_models import FLAGS, PROMPTS
from waiting import until

pytestmark = pytest.mark.mesh
models = pytest.fixture(scope="module")(three_models)
DEV = (*FLAGS, "--server-dev-mode", "-dp", "2")
LENGTH = 200


class Stream:
    """One long answer, read as it comes, and what was told of its weights."""

    def __init__(self, server: Serving, rank: int | None, length: int = LENGTH) -> None:
        self.ids: list[int] = []
        self.told: list[tuple[int, str]] = []
        self.reason = self.error = ""
        self.has_begun = threading.Event()
        self._body = {"prompt": PROMPTS[1], "max_tokens": length, "ignore_eos": True, "temperature": 0}
        self._body |= {"return_token_ids": True, "stream": True}
        self._url, self._headers = server.url, {} if rank is None else {"X-data-parallel-rank": str(rank)}

    def read(self) -> None:
        url = f"{self._url}/v1/completions"
        with httpx.stream("POST", url, json=self._body, headers=self._headers, timeout=300) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self._chunk(json.loads(line[6:]))
        self.has_begun.set()

    def _chunk(self, chunk: dict[str, object]) -> None:
        if "error" in chunk:
            self.error = str(chunk["error"])
            return
        choices = chunk["choices"]
        assert isinstance(choices, list)
        for choice in choices:
            self.ids += choice.get("token_ids") or []
            self.told = [tuple(one) for one in choice.get("weights_versions") or self.told]
            self.reason = choice.get("finish_reason") or self.reason
            self.has_begun.set()


def begun(server: Serving, pool: ThreadPoolExecutor, *ranks: int | None) -> tuple[list[Stream], list[Future[None]]]:
    """Streams that run at these ranks."""
    streams = [Stream(server, rank) for rank in ranks]
    reading = [pool.submit(stream.read) for stream in streams]
    for stream in streams:
        assert stream.has_begun.wait(60)
    return streams, reading


def test_each_answer_is_of_one_version_and_both_serve_meanwhile(models: Models) -> None:
    (a, b, _), (first, second, _) = models
    with serving(a, *DEV) as server, ThreadPoolExecutor(8) as pool:
        update(server, a, "old")
        streams, reading = begun(server, pool, 0, 1, None)
        body = {"model_path": b, "weight_version": "new", "rolling": True}
        rolled = pool.submit(httpx.post, f"{server.url}/update_weights_from_disk", json=body, timeout=300)
        until(
            lambda: "ranks have them" in str(httpx.get(f"{server.url}/weight_info").json()["updating"]) or rolled.done()
        )
        refused = str(post(server, "/update_weights_from_disk", {"model_path": f"{b}/nowhere"}, 409))
        assert "another update" in refused or rolled.done()
        late, reading_late = begun(server, pool, None, None)
        assert rolled.result().status_code == 200, rolled.result().text
        for one in (*reading, *reading_late):
            one.result()
        for stream in streams:
            assert (stream.error, stream.told, len(stream.ids)) == ("", [(0, "old")], LENGTH)
            assert stream.ids[:24] == first[1]
        for stream in late:
            ((_, label),) = stream.told
            assert stream.ids[:24] == (first if label == "old" else second)[1]
        assert versions(server) == ("new", [("new", "")] * 2)
        assert [pinned(server, rank) for rank in (0, 1)] == [second[0]] * 2


def test_keep_moves_what_runs_and_abort_ends_it(models: Models) -> None:
    (a, b, c), (_, second, third) = models
    with serving(a, *DEV) as server, ThreadPoolExecutor(8) as pool:
        for folder, mode, tokens in ((b, "keep", second), (c, "abort", third)):
            streams, reading = begun(server, pool, None, None, None)
            update(server, folder, mode, rolling=True, mode=mode)
            for one in reading:
                one.result()
            for stream in streams:
                assert not stream.error
                assert len(stream.ids) == LENGTH or stream.reason == "abort"
            assert [pinned(server, rank) for rank in (0, 1)] == [tokens[0]] * 2


def test_what_cannot_be_rolled_is_refused_by_name(models: Models, tmp_path: Path) -> None:
    (a, b, _), (first, second, _) = models
    with serving(a, *DEV, "--enable-sleep-mode") as server:
        wrong = {"model_path": b, "rolling": True, "flush_cache": False}
        assert "flush_cache" in str(post(server, "/update_weights_from_disk", wrong, 409))
        same = {"model_path": b, "rolling": True, "weight_version": "0"}
        assert "rolling needs another name" in str(post(server, "/update_weights_from_disk", same, 409))
        nowhere = {"model_path": str(tmp_path / "nowhere"), "rolling": True}
        assert "nowhere" in str(post(server, "/update_weights_from_disk", nowhere, 409))
        for path in ("/pause", "/sleep"):
            post(server, path)
            found = str(post(server, "/update_weights_from_disk", {"model_path": b, "rolling": True}, 409))
            assert "rolling: the " in found
            post(server, "/resume" if path == "/pause" else "/wake_up")
        assert [pinned(server, rank) for rank in (0, 1)] == [first[0]] * 2
        post(server, "/start_weight_update", {"rolling": True})
        post(server, "/update_weights", {"update_info": {"path": b}})
        assert [pinned(server, rank) for rank in (0, 1)] == [first[0]] * 2
        post(server, "/finish_weight_update", {"weight_version": "steps", "rolling": True})
        assert [pinned(server, rank) for rank in (0, 1)] == [second[0]] * 2
    with serving(a, *FLAGS, "--server-dev-mode") as server:
        alone = post(server, "/update_weights_from_disk", {"model_path": b, "rolling": True}, 409)
        assert "there is one rank only" in str(alone)


@pytest.mark.parametrize("role", ["worker", "scheduler", "coordinator", "detokenizer"])
@pytest.mark.parametrize("when", ["at once", "between ranks"])
def test_a_death_in_a_roll_loses_no_token_and_ends_in_one_version(models: Models, role: str, when: str) -> None:
    (a, b, _), (first, second, _) = models
    with serving(a, *DEV) as server, ThreadPoolExecutor(8) as pool:
        update(server, a, "old")
        streams, reading = begun(server, pool, None, None, None, None)
        body = {"model_path": b, "weight_version": "new", "rolling": True}
        rolled = pool.submit(httpx.post, f"{server.url}/update_weights_from_disk", json=body, timeout=300)
        if when == "between ranks":
            until(lambda: ("new", "") in versions(server)[1], 60)
        kill(server, role)
        rolled.result()
        for one in reading:
            one.result()
        for stream in streams:
            assert (stream.error, stream.told, len(stream.ids)) == ("", [(0, "old")], LENGTH)
            assert stream.ids[:24] == first[1]
        until(lambda: {version for version, _ in versions(server)[1]} == {versions(server)[0]}, 60)
        is_new = versions(server)[0] == "new"
        assert [pinned(server, rank) for rank in (0, 1)] == [(second if is_new else first)[0]] * 2
        update(server, b, "again", rolling=True)
        assert [pinned(server, rank) for rank in (0, 1)] == [second[0]] * 2


def test_a_rank_that_cannot_have_them_sends_all_back(models: Models, tmp_path: Path) -> None:
    """The files of the new version change while the first rank has read them."""
    (a, _, _), (first, _, _) = models
    folder = tmp_path / "fleeting"
    write(folder, 7)
    with serving(a, *DEV) as server, ThreadPoolExecutor(8) as pool:
        streams, reading = begun(server, pool, 1)
        body = {"model_path": str(folder), "weight_version": "new", "rolling": True}
        rolled = pool.submit(httpx.post, f"{server.url}/update_weights_from_disk", json=body, timeout=300)
        until(lambda: ("new", "") in versions(server)[1], 60)
        (folder / "model.safetensors").unlink()
        answer = rolled.result()
        for one in reading:
            one.result()
        assert answer.status_code == 409
        assert "fleeting" in answer.text
        assert (streams[0].error, len(streams[0].ids)) == ("", LENGTH)
        until(lambda: versions(server) == ("0", [("0", "")] * 2), 60)
        assert [pinned(server, rank) for rank in (0, 1)] == [first[0]] * 2
