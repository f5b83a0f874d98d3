"""The dashboard of a mesh that serves: what it shows is what is there, a kill and how it heals too."""

import os
import signal
from collections.abc import Iterator

import httpx
import pytest
from browser import Browser
from serving import Serving, serving
from waiting import until

pytestmark = pytest.mark.mesh
ROLES = ("supervisor", "frontend", "detokenizer", "coordinator", "scheduler", "worker")


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving("--device", "fake", "--fake-step-ms", "10", "--max-model-len", "4096") as found:
        yield found


@pytest.fixture(scope="module")
def page(server: Serving) -> Iterator[Browser]:
    browser = Browser()
    browser.open(f"{server.url}/dashboard")
    browser.until("byId('state').textContent === 'serving'")
    yield browser
    browser.close()


def box(name: str) -> str:
    """The drawing's box of a process."""
    return f"boxes.get('{name}').group"


def ask(page: Browser, num_tokens: int) -> None:
    page.run(f"byId('slider-max_tokens').max = {num_tokens}; byId('slider-max_tokens').value = {num_tokens}")
    page.run("byId('clear').click(); byId('message').value = 'Hi'; byId('ask').requestSubmit()")
    page.until("document.querySelector('.turn.assistant .content')?.textContent")


def test_it_draws_the_mesh_and_what_goes_over_its_links(server: Serving, page: Browser) -> None:
    ask(page, 2000)
    for role in ROLES:
        page.until(f"{box(f'{role}/0')}.classList.contains('is-ready')")
    page.until("feed.latest.edges.some((e) => e.source === 'scheduler/0' && e.target === 'worker/0' && e.per_s > 20)")
    page.until("feed.latest.generated_per_s > 20 && feed.latest.itl.count > 0 && feed.latest.running.length === 1")
    assert page.run("feed.latest.ranks.length === 1 && feed.latest.ranks[0].running === 1")
    page.run("byId('stop').click()")
    page.until("document.querySelectorAll('#request-rows tr').length === 1")
    page.run("byId('process-details').open = true")
    pids = {f"{one['role']}/{one['index']}": str(one["pid"]) for one in server.status()["processes"]}
    for name, pid in pids.items():
        row = f"[...byId('processes').rows].find((row) => row.cells[0].textContent === '{name}')"
        assert page.until(f"{row}?.cells[7].textContent") == pid


def test_a_kill_is_shown_as_it_heals_and_the_answer_goes_on(server: Serving, page: Browser) -> None:
    ask(page, 300)
    killed = server.pid("worker")
    os.kill(killed, signal.SIGKILL)
    until(lambda: server.pid("worker") not in (0, killed))
    started = server.pid("worker")
    os.kill(started, signal.SIGSTOP)  # it takes as long to start as the page takes to see that it is away
    page.until(f"!{box('worker/0')}.classList.contains('is-ready')")
    os.kill(started, signal.SIGCONT)
    page.until(f"{box('worker/0')}.textContent.includes('↻1') && {box('worker/0')}.classList.contains('is-ready')")
    page.until("/worker.0 is ready again after/.test(byId('news-lines').textContent)")
    page.until("/worker.0 died and is started again .*signal 9/.test(byId('news-lines').textContent)")
    page.until("byId('said').textContent.includes(', 300 tokens')")


def test_the_page_comes_back_after_its_frontend_was_killed(server: Serving, page: Browser) -> None:
    os.kill(server.pid("frontend"), signal.SIGKILL)
    page.until("byId('state').textContent.startsWith('not connected')")
    page.until("byId('state').textContent === 'serving' && boxes.get('frontend/0').group.textContent.includes('↻1')")


def test_any_frontend_shows_the_requests_of_all() -> None:
    """Each connection meets one of two frontends by chance."""
    with serving("--device", "fake", "--frontends", "2") as both:
        body = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
        ids = {httpx.post(f"{both.url}/v1/completions", json=body).json()["id"] for _ in range(24)}
        found = httpx.get(f"{both.url}/dashboard/history").json()["requests"]
    assert {one["id"] for one in found} == ids
    assert len({one.get("frontend", "") for one in found}) == 2, "one in eight million runs meets one frontend alone"
