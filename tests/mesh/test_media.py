"""Images in a mesh with the fake device, whose tokens are a function of what each image is: what dies loses and repeats nothing.

The items are those of the real processor, made in this process in another way than the mesh makes them.
"""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from image_files import crafted, data_url, file_of, picture, readable
from image_requests import (
    FLAGS,
    LIMIT_S,
    ask,
    body,
    cached,
    fresh,
    ids_of,
    image_host,
    part,
    placed,
    processor_of,
    right,
    seeds,
    stream,
)
from seeing_models import seeing_model
from serving import Serving, serving
from waiting import until

from meshlm.mediaproc.images import decoded
from meshlm.mediaproc.processors import Processor
from meshlm.protocol.media import Modality
from meshlm.runtime.process.shared_memory import folder_of

pytestmark = pytest.mark.mesh


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_model(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="session")
def processor(folder: Path) -> Processor:
    return processor_of(folder)


@pytest.fixture(scope="session")
def seeing(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    local = tmp_path_factory.mktemp("images")
    (local / "a.png").write_bytes(file_of(picture(77)))
    (local / "outside").symlink_to("/etc/hostname")
    flags = ("--allowed-local-media-path", str(local), "--limit-mm-per-prompt", '{"image": 4}')
    with serving(str(folder), *FLAGS, *flags, "--detokenizers", "2", "--max-media-bytes", "2M") as server:
        server.local = local  # type: ignore[attr-defined]
        yield server


def test_images_are_seen_in_their_order(seeing: Serving, processor: Processor) -> None:
    first, second = fresh(), fresh((150, 40))
    answer = ask(seeing, "what is ", part(data_url(first)), " and ", part(data_url(second)), "?")
    right(processor, answer, first, second)
    right(
        processor, ask(seeing, "what is ", part(data_url(second)), " and ", part(data_url(first)), "?"), second, first
    )
    right(processor, ask(seeing, part(data_url(first))), first)


def test_a_shared_text_hits_and_so_does_the_same_image(seeing: Serving, processor: Processor) -> None:
    text, one, other = (
        f"{next(seeds)} a text of some length that both requests have before the image, ",
        fresh(),
        fresh(),
    )
    before = cached(ask(seeing, text, part(data_url(one)), " what?"))
    again = ask(seeing, text, part(data_url(one)), " what?")
    another = ask(seeing, text, part(data_url(other)), " what?")
    prompt, _ = ids_of(again)
    begin = placed(processor, prompt, one)[0].position
    assert before < 16
    assert cached(again) >= len(prompt) - 32
    assert begin - 32 < cached(another) <= begin, "the text hits, the image does not"
    right(processor, again, one)
    right(processor, another, other)


def test_other_apis(seeing: Serving, processor: Processor) -> None:
    data = fresh()
    encoded = data_url(data).partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    message = {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]}
    asked = {"max_tokens": 6}
    models = httpx.get(f"{seeing.url}/v1/models").json()["data"][0]["id"]
    chat = ask(seeing, part(data_url(data)), "what?")
    text = chat.json()["choices"][0]["message"]["content"]
    given = httpx.post(
        f"{seeing.url}/v1/messages", json={**asked, "model": models, "messages": [message]}, timeout=LIMIT_S
    )
    assert given.status_code == 200, given.text
    usage = given.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat.json()["usage"]["prompt_tokens"]
    parts = [{"type": "input_image", "image_url": data_url(data)}, {"type": "input_text", "text": "what?"}]
    response = httpx.post(
        f"{seeing.url}/v1/responses",
        json={"model": models, "input": [{"role": "user", "content": parts}], "max_output_tokens": 6},
        timeout=LIMIT_S,
    )
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["input_tokens"] == chat.json()["usage"]["prompt_tokens"]
    assert text
    right(processor, chat, data)


def test_the_openai_client_sends_an_image(seeing: Serving) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", timeout=LIMIT_S)
    content: Any = [{"type": "text", "text": "what?"}, part(data_url(fresh(), "image/jpeg"))]
    made = client.chat.completions.create(
        model=client.models.list().data[0].id, max_tokens=5, messages=[{"role": "user", "content": content}]
    )
    assert made.usage is not None
    assert made.usage.prompt_tokens > 20


def test_names_of_images(seeing: Serving, processor: Processor) -> None:
    data = fresh()
    right(processor, ask(seeing, part(data_url(data), uuid="cat"), "what?"), data)
    right(processor, ask(seeing, {"type": "image_url", "image_url": None, "uuid": "cat"}, "who?"), data)
    unknown = ask(seeing, {"type": "image_url", "image_url": None, "uuid": "dog"}, "who?")
    assert (unknown.status_code, "is not known" in unknown.text) == (400, True)
    other = ask(seeing, {"type": "image_url", "image_url": None, "uuid": "cat"}, "who?", cache_salt="another")
    assert other.status_code == 400, "a name is its owner's"


BAD = {
    "not base64": ("data:image/png;base64,@@@", "no valid base64"),
    "empty": ("data:image/png;base64,", "is empty"),
    "a page": ("data:text/html;base64,aGk=", "is no image"),
    "no comma": ("data:image/png;base64", "needs a comma"),
    "ftp": ("ftp://a.example/b.png", "begins with data:"),
    "this host": ("http://127.0.0.1:9/a.png", "private network"),
    "this host by name": ("http://localhost:9/a.png", "private network"),
    "this host in IPv6": ("http://[::1]:9/a.png", "private network"),
    "this host, mapped": ("http://[::ffff:127.0.0.1]:9/a.png", "private network"),
    "this host in octal": ("http://0177.0.0.1:9/a.png", "private network"),
    "this host as a number": ("http://2130706433:9/a.png", "private network"),
    "metadata": ("http://169.254.169.254/latest/meta-data", "private network"),
    "a user": ("http://a:b@1.1.1.1/a.png", "user or a password"),
    "no host": ("http:///a.png", "no URL"),
    "a file outside": ("file:///etc/hostname", "no such file below"),
    "a file that is none": ("file:///etc/../proc/self/mem", "no such file below"),
    "another host's file": ("file://a.example/etc/hostname", "of this host"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_urls_are_refused_by_name(seeing: Serving, name: str) -> None:
    url, words = BAD[name]
    answer = ask(seeing, "hi", part(url))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == "messages"
    assert "messages[0].content[1].image_url.url" in error["message"]


def test_files_below_the_folder_are_read(seeing: Serving, processor: Processor) -> None:
    local = seeing.local  # type: ignore[attr-defined]
    right(processor, ask(seeing, part(f"file://{local}/a.png")), file_of(picture(77)))
    for name in ("outside", "nothing.png", "../images/../../../etc/hostname"):
        assert ask(seeing, part(f"file://{local}/{name}")).status_code == 400


def test_what_is_too_much(seeing: Serving) -> None:
    image = part(data_url(fresh()))
    many = ask(seeing, *[image] * 5)
    assert (many.status_code, "--limit-mm-per-prompt" in many.text) == (400, True)
    large = ask(seeing, part(data_url(bytes(3 << 20))))
    assert (large.status_code, "--max-media-bytes" in large.text) == (400, True)
    words = ask(seeing, image, "and <|image_pad|> as text")
    assert (words.status_code, "must not have the placeholder" in words.text) == (400, True)
    cut = ask(seeing, image, "hello", truncate_prompt_tokens=24)
    assert (cut.status_code, "goes through the image" in cut.text) == (400, True)
    long = ask(seeing, *[image] * 4, "x" * 2000)
    assert (long.status_code, "maximum context length" in long.text) == (400, True)
    unknown = ask(seeing, image, mm_processor_kwargs={"nonsense": 1})
    assert (unknown.status_code, "nonsense" in unknown.text) == (400, True)


def memory(server: Serving) -> int:
    """Bytes that the media process and its children have; pages that a fork shares count once."""
    process, found = psutil.Process(server.pid("media")), 0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a child that has made its image
            found += one.memory_full_info().pss
    return found


def test_crafted_files_are_refused_and_harm_nobody(seeing: Serving, processor: Processor) -> None:
    data = fresh()
    right(processor, ask(seeing, part(data_url(data))), data)
    pid, before = seeing.pid("media"), memory(seeing)
    for name, (file, words) in sorted(crafted().items()):
        if len(file) > 1 and len(file) < 2 << 20:
            answer = ask(seeing, part(data_url(file)), "what?")
            assert answer.status_code == 400, (name, answer.text)
            assert words in answer.json()["error"]["message"], name
            assert memory(seeing) < before + (64 << 20), name
    for name, file in sorted(readable().items()):
        assert ask(seeing, part(data_url(file)), "what?", count=1).status_code == 200, name
    assert seeing.pid("media") == pid
    right(processor, ask(seeing, part(data_url(data)), "?"), data)


@pytest.mark.parametrize("role", ["media", "detokenizer", "scheduler", "worker"])
def test_a_process_dies_while_an_image_is_answered(seeing: Serving, processor: Processor, role: str) -> None:
    data, killed = fresh(), list[int]()

    def kill(count: int) -> None:
        if count >= 8 and not killed:
            for process in seeing.status()["processes"]:
                if process["role"] == role:
                    killed.append(process["pid"])
                    os.kill(process["pid"], signal.SIGKILL)

    asked = body("what is ", part(data_url(data)), "?", count=40)
    ids = stream(seeing, asked, kill)
    assert killed
    until(lambda: all(one["state"] == "ready" for one in seeing.status()["processes"]), limit_s=60)
    whole = ask(seeing, "what is ", part(data_url(data)), "?", count=40)
    right(processor, whole, data, count=40)
    assert ids == ids_of(whole)[1]


def test_the_media_process_dies_before_it_has_answered(seeing: Serving, processor: Processor) -> None:
    data, found = fresh((1500, 1200)), list[httpx.Response]()
    asking = threading.Thread(target=lambda: found.append(ask(seeing, part(data_url(data)), "what?")))
    pid = seeing.pid("media")
    os.kill(pid, signal.SIGSTOP)
    try:
        asking.start()
        until(
            lambda: any(row["requests"] for row in seeing.status()["processes"] if "requests" in row) or True, limit_s=5
        )
    finally:
        os.kill(pid, signal.SIGKILL)
    asking.join(LIMIT_S)
    right(processor, found[0], data)


def test_the_frontend_dies_and_its_client_comes_again(seeing: Serving, processor: Processor) -> None:
    data, killed = fresh(), list[int]()

    def kill(count: int) -> None:
        if count >= 5 and not killed:
            killed.append(seeing.pid("frontend"))
            os.kill(killed[0], signal.SIGKILL)

    headers = {"Idempotency-Key": f"image-{next(seeds)}"}
    asked = body("what is ", part(data_url(data)), "?", count=40)
    with pytest.raises(httpx.HTTPError):
        stream(seeing, asked, kill, headers)
    until(lambda: _answers(seeing), limit_s=60)
    ids = stream(seeing, asked, lambda count: None, headers)
    whole = ask(seeing, "what is ", part(data_url(data)), "?", count=40)
    right(processor, whole, data, count=40)
    assert ids == ids_of(whole)[1]


def _answers(server: Serving) -> bool:
    try:
        return httpx.get(f"{server.url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_images_are_fetched_where_the_flags_allow_it(folder: Path, processor: Processor) -> None:
    flags = ("--allow-private-media-addresses", "--allowed-media-domains", '["127.0.0.1"]', "--max-media-bytes", "1M")
    with image_host() as url, serving(str(folder), *FLAGS, *flags, "--media-fetch-timeout", "3") as server:
        right(processor, ask(server, part(f"{url}/a.png")), file_of(picture(88)))
        refused = {
            f"{url}/moved.png": "redirects are not followed",
            f"{url}/missing.png": "answers 404",
            f"{url}/endless.png": "--max-media-bytes",
            f"{url}/slow.png": "--media-fetch-timeout",
            url.replace("127.0.0.1", "localhost"): "--allowed-media-domains",
            "http://127.0.0.1:1/a.png": "cannot be fetched",
        }
        for asked, words in refused.items():
            answer = ask(server, part(asked))
            assert (answer.status_code, words in answer.text) == (400, True), (asked, answer.text)
        shared = folder_of(server.run_dir)
        assert [path for path in shared.iterdir() if re.fullmatch("[0-9a-f]{64}", path.name)]
    assert not shared.exists()


def test_a_mesh_that_was_killed_leaves_no_files_for_long(folder: Path) -> None:
    server = Serving(str(folder), *FLAGS)
    try:
        server.wait_for("ready: http")
        shared = folder_of(server.run_dir)
        assert shared.exists()
        server.process.kill()
        server.process.wait(30)
    finally:
        server.stop()
    with serving("--device", "fake"):
        assert not shared.exists()


def test_language_alone(folder: Path) -> None:
    with serving(str(folder), *FLAGS, "--language-model-only") as server:
        assert "media" not in [one["role"] for one in server.status()["processes"]]
        answer = ask(server, part(data_url(fresh())))
        assert (answer.status_code, "--language-model-only" in answer.text) == (400, True)


def test_many_more_images_than_there_is_room_for(folder: Path, processor: Processor) -> None:
    """Files are free when their requests end: each image waits for room at most, and shared memory keeps its bound."""
    room, count = 1 << 20, 60
    files = [fresh((640, 480)) for _ in range(count)]
    image = decoded(files[0], 1 << 30, (255, 255, 255))
    each = sum(array.nbytes for array in processor.made(Modality.IMAGE, image, {}).tensors)
    assert count * each > 5 * room, "they are few"
    assert 8 * each > room, "all that run at once have room"
    with serving(str(folder), *FLAGS, "--mm-processor-cache-gb", str(room / (1 << 30))) as server:
        ask(server, part(data_url(fresh())))
        shared = folder_of(server.run_dir)
        memory = psutil.Process(server.pid("media")).memory_info().rss
        most = 0
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, server, part(data_url(data)), "what?") for data in files]
            while not all(one.done() for one in asked):
                most = max(most, _bytes_of(shared))
                wait([one for one in asked if not one.done()], 0.02)
        for one, data in zip(asked, files, strict=True):
            right(processor, one.result(), data)
        at_once = min(4, max(1, len(os.sched_getaffinity(0)) // 2))
        assert most <= room + 2 * at_once * each, "files that are being made are few"
        assert _bytes_of(shared) <= room
        assert psutil.Process(server.pid("media")).memory_info().rss < memory + (64 << 20)


def _bytes_of(folder: Path) -> int:
    """What all files of the folder have; some go meanwhile."""
    found = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size
    return found
