"""The page in a real browser, before a frontend whose model says what the test wants."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from browser import Browser
from dashboard_site import Site

from meshlm.frontend.dashboard.requests import Noted
from meshlm.protocol.counts import CountsOf, ProcessCounts
from meshlm.protocol.edges.control import MeshProcesses, MeshStats, News, ProcessReport
from meshlm.protocol.edges.text import Finished
from meshlm.protocol.edges.token import First
from meshlm.protocol.wire.ids import FinishReason, Identity, Incarnation, Role

HOSTILE = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>"
LIMIT_S = 20


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    found = Site(api_key=("secret",), enable_auto_tool_choice=True, tool_call_parser="hermes")
    yield found
    found.stop()


@pytest.fixture
def page(site: Site, browser: Browser) -> Browser:
    """The page, with its key, and with nothing of a test before."""

    def anew() -> None:
        site.backend.pieces = ("Hello", " you")
        site.backend.stops_at = -1
        site.backend.go.set()

    site.do(anew)
    browser.open(site.url)
    browser.run("sessionStorage.setItem('meshlm.key', 'secret'); localStorage.clear()")
    browser.open(site.url)
    browser.until("feed.latest !== null")
    return browser


def noted(**facts: Any) -> Noted:
    """A request that has ended, with these facts."""
    plain = Noted(
        "cmpl-0", "/v1/completions", 200, "", 1, 5, 100.0, 1e9, 91.0, 0.0, 0.0, 0.0, 0.0, None, None, "0", 7, 0
    )
    return plain._replace(**facts)


def ask(page: Browser, text: str) -> None:
    page.run(f"byId('message').value = {json.dumps(text)}; byId('ask').requestSubmit()")


def test_it_asks_for_the_key_and_shows_data_once_it_has_it(site: Site, browser: Browser) -> None:
    browser.open(site.url)
    browser.run("sessionStorage.clear()")
    browser.open(site.url)
    browser.until("byId('key-dialog').open")
    assert "Unauthorized" in browser.text("#key-why")
    browser.run("byId('key').value = 'secret'; byId('key-form').requestSubmit()")
    browser.until("byId('state').textContent === 'serving'")
    browser.until("byId('tile-generated').textContent === '0'")
    assert not browser.run("byId('key-dialog').open")
    assert browser.run("sessionStorage.getItem('meshlm.key')") == "secret"
    assert browser.run("performance.getEntriesByName('first-contentful-paint').length") == 1
    wrong = [line for line in browser.console() if "401" not in line]  # which the browser says itself
    assert not wrong, wrong


def test_the_tiers_of_a_store_are_shown_where_there_is_one(page: Browser, site: Site) -> None:
    assert page.run("byId('stores').hidden")
    gauges = {
        "kv_store_bytes": {"memory": 6e8},
        "kv_store_capacity_bytes": {"memory": 1e9},
        "kv_store_hit_rate_ceiling": {"": 0.9},
    }
    told = ProcessCounts({"kv_store_queries": {"": 4.0}, "kv_store_hits": {"memory": 2.0}}, gauges)
    site.do(lambda: site.backend.figures.take(MeshStats(True, counts=(CountsOf(Identity(Role.STORE), told),))))
    page.until("!byId('stores').hidden")
    assert page.text("#tier-rows tr") == "memory 600 MB of 1000 MB200"
    assert (
        "It had 50 % of the blocks that it was asked for; a store without any bound would have had 90 %."
        in page.text("#stores")
    )
    site.do(lambda: site.backend.figures.take(MeshStats(True)))
    page.until("byId('stores').hidden")


def test_an_answer_is_shown_as_it_comes(page: Browser, site: Site) -> None:
    def half() -> None:
        site.backend.pieces = ("One", " two", " three")
        site.backend.stops_at = 2

    site.do(half)
    ask(page, "Count!")
    page.until("document.querySelector('.turn.assistant .content')?.textContent === 'One two'")
    assert page.text(".turn.user pre") == "Count!"
    assert page.run("byId('send').disabled")
    page.run("byId('stop').click()")
    page.until("byId('said').textContent === 'stopped' && !byId('send').disabled")


def test_the_conversation_and_the_sliders_go_with_the_next_message(page: Browser, site: Site) -> None:
    ask(page, "Hi")
    page.until("byId('said').textContent.startsWith('first token after')")
    page.run(
        "byId('slider-temperature').value = 1.5; byId('slider-max_tokens').value = 7; byId('system').value = 'Be brief'"
    )
    ask(page, "And?")
    page.until("document.querySelectorAll('.turn.assistant .content').length === 2")
    prompt, submit = site.do(lambda: (site.backend.prompt, site.backend.submits[-1]))
    said = [(message["role"], message["content"]) for message in json.loads(prompt.messages_json)]
    assert said == [("system", "Be brief"), ("user", "Hi"), ("assistant", "Hello you"), ("user", "And?")]
    assert (submit.sampling.temperature, submit.max_tokens) == (1.5, 7)


def test_a_new_conversation_has_nothing_of_an_answer_that_was_on_its_way(page: Browser, site: Site) -> None:
    """The answer that was cut off stood at the beginning of the next conversation."""

    def half() -> None:
        site.backend.pieces = ("One", " two", " three")
        site.backend.stops_at = 2

    def whole() -> None:
        site.backend.pieces = ("Hello", " you")
        site.backend.stops_at = -1

    site.do(half)
    ask(page, "Count!")
    page.until("document.querySelector('.turn.assistant .content')?.textContent === 'One two'")
    site.do(whole)
    page.run("window.before = talk; byId('clear').click()")
    ask(page, "Hi")
    page.until("byId('said').textContent.startsWith('first token after')")
    page.until("before.messages.length === 2")  # the answer that was cut off has ended, where it belongs
    assert page.run("talk.messages.map((message) => message.content).join()") == "Hi,Hello you"
    assert page.run("document.querySelectorAll('.turn').length") == 2
    prompt = site.do(lambda: site.backend.prompt)
    assert [message["content"] for message in json.loads(prompt.messages_json)] == ["Hi"]


def test_while_tokens_come_it_says_so(page: Browser, site: Site) -> None:
    def half() -> None:
        site.backend.pieces = ("One", " two", " three")
        site.backend.stops_at = 2

    site.do(half)
    site.do(site.backend.go.clear)
    ask(page, "Count!")
    page.until("byId('said').textContent === 'waiting'")
    site.do(site.backend.go.set)
    page.until("byId('said').textContent.startsWith('answering; first token after')")
    page.run("byId('clear').click()")
    assert page.run("byId('said').textContent") == ""
    assert not page.run("byId('send').disabled")


def test_a_slider_that_nobody_moved_is_the_models(page: Browser) -> None:
    asked = "Object.keys(JSON.parse(body())).sort().join()"
    plain = "messages,model,stream,stream_options"
    assert page.run(asked) == plain
    assert page.run("document.querySelector('#sampling output').textContent") == "model's default"
    page.run("byId('slider-top_p').value = 1; byId('slider-top_p').dispatchEvent(new Event('input'))")
    assert page.run("JSON.parse(body()).top_p") == 1
    assert page.run("document.querySelector('output[for=slider-top_p]').textContent") == "1"
    page.run("byId('unset').click()")
    assert page.run(asked) == plain


def test_a_figure_of_what_was_not_measured_is_none(site: Site, browser: Browser) -> None:
    browser.open(site.url)
    browser.run("sessionStorage.setItem('meshlm.key', 'secret')")
    browser.open(site.url)
    browser.until("byId('tile-generated').textContent === '0'")
    for name in ("ttft50", "ttft90", "ttft99", "itl50", "itl90", "itl99"):
        assert browser.text(f"#tile-{name}") == "-"
    assert browser.run("measured(0.0004)") == "400 µs"


def test_a_call_of_a_tool_is_shown(page: Browser, site: Site) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bern"}}\n</tool_call>'
    site.do(lambda: setattr(site.backend, "pieces", (call,)))
    page.run("byId('tools').value = JSON.stringify([{type: 'function', function: {name: 'weather', parameters: {}}}])")
    ask(page, "Rain?")
    assert page.until("document.querySelector('.turn .call')?.textContent") == 'weather({"place": "Bern"})'


def test_a_refusal_is_shown(page: Browser) -> None:
    page.run("byId('tools').value = '[{}]'")
    ask(page, "Hi")
    page.until("document.querySelector('.turn .failure')?.textContent.includes('tools')")


def test_what_a_model_says_runs_no_script(page: Browser, site: Site) -> None:
    """Nor do names of requests, which clients choose, and lines of the log."""

    def hostile() -> None:
        site.backend.pieces = (HOSTILE, "javascript:alert(1)")
        worker = ProcessReport(Identity(Role.WORKER), Incarnation(1), 1, "ready", 0.0, 0, HOSTILE, 0, HOSTILE)
        site.backend.mesh = MeshProcesses((worker,), (), (News(1e12, "error", HOSTILE),), HOSTILE)
        site.backend.feed._ended.add(noted(name=HOSTILE, path=HOSTILE, error=HOSTILE, rank=HOSTILE))

    site.do(hostile)
    ask(page, HOSTILE)
    page.until(
        f"document.querySelector('.turn.assistant .content')?.textContent === {json.dumps(HOSTILE + 'javascript:alert(1)')}"
    )
    page.until(f"document.querySelector('#news-lines').textContent.includes({json.dumps(HOSTILE)})")
    page.until(f"document.querySelector('#request-rows').textContent.includes({json.dumps(HOSTILE)})")
    assert page.run("document.querySelectorAll('img, script, iframe').length") == 1, "the page's own script"
    assert page.run("typeof window.pwned") == "undefined"
    site.do(lambda: setattr(site.backend, "mesh", MeshProcesses(())))
    assert not [line for line in page.console() if "alert" in line or "Error" in line]


def test_the_policy_holds_against_script_that_got_into_the_page_all_the_same(page: Browser) -> None:
    refused = "(() => {{ try {{ {}; return 'done' }} catch (error) {{ return error.name }} }})()"
    assert page.run(refused.format("document.body.innerHTML = '<img>'")) == "TypeError"
    assert page.run(refused.format("eval('window.pwned = 1')")) == "EvalError"
    assert page.run(refused.format("document.createElement('script').textContent = 'window.pwned = 1'")) == "TypeError"
    for way in ("a.href = 'javascript:window.pwned = 1'", "a.setAttribute('onclick', 'window.pwned = 1')"):
        page.run(f"{{ const a = document.createElement('a'); {way}; document.body.append(a); a.click(); a.remove() }}")
    page.run("fetch('http://127.0.0.2:9/').then(() => window.pwned = 1, (error) => window.stopped = error.name)")
    page.until("window.stopped === 'TypeError'")
    assert page.run("typeof window.pwned") == "undefined"


def test_slow_requests_come_first_and_say_where_their_time_went(page: Browser, site: Site) -> None:
    def some() -> None:
        for number in range(1500):
            since = 100.0 - number / 1000
            site.backend.feed._ended.add(
                noted(
                    name=f"cmpl-{number}",
                    opened_at=since - 1,
                    accepted_at=since - 0.9,
                    first_at=99.5,
                    last_at=99.9,
                    finished=Finished(0, FinishReason.STOP),
                    first=First(0, int(1000 * number), 1000, 0, 1000, 1000),
                )
            )

    site.do(some)
    page.until("document.querySelector('#request-rows tr button')?.textContent === 'cmpl-1499'")
    assert page.run("feed.ended.size") == 1000
    assert page.run("document.querySelectorAll('#request-rows tr').length") == 100
    assert "queue 1.50 s" in page.run("document.querySelector('#request-rows .hops').getAttribute('aria-label')")
    page.run("document.querySelector('#request-rows tr button').click()")
    assert page.run("document.querySelector('#request-rows .hop-list').checkVisibility()")
    page.run("byId('order').value = 'encode'; byId('order').dispatchEvent(new Event('change'))")
    assert page.run("document.querySelectorAll('#request-rows tr').length") == 100


# While a process is started there are ten events a second.
HEALING = MeshProcesses((ProcessReport(Identity(Role.WORKER, 0), Incarnation(1), 7, "starting", 0.0, 1, "weights"),))


def test_it_follows_a_thousand_requests_ten_times_a_second(
    page: Browser, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(page, "Hi")
    page.until("byId('said').textContent.startsWith('first token after')")

    def many() -> None:
        (choice,) = site.backend.answers[-1].choices
        choice.opened_at = choice.accepted_at = 1.0
        monkeypatch.setattr(site.backend, "open_choices", lambda: [choice] * 1000)
        site.backend.num_open = 1000

    site.do(many)
    site.do(lambda: setattr(site.backend, "mesh", HEALING))
    page.run("byId('which').value = 'running'; byId('which').dispatchEvent(new Event('change'))")
    page.until("byId('request-count').textContent.includes('1000 open')")
    page.run("window.begun = feed.latest.number")
    page.until("feed.latest.number >= begun + 20", limit_s=6)
    page.run("byId('which').value = 'ended'; byId('which').dispatchEvent(new Event('change'))")
    site.do(lambda: setattr(site.backend, "num_open", 0))
    site.do(lambda: setattr(site.backend, "mesh", MeshProcesses(())))


@pytest.mark.parametrize("width", [400, 1280, 2560])
def test_it_fits_a_phone_and_a_wall(page: Browser, width: int) -> None:
    page.size(width, 900)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run("document.querySelector('#message').getBoundingClientRect().width > 200")


def test_light_and_dark(page: Browser, site: Site) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    page.run("theme.value = 'dark'; theme.dispatchEvent(new Event('change'))")
    dark = page.run(ground)
    assert light != dark
    page.open(site.url)
    assert page.run(ground) == dark, "it is kept"
    at_night = Browser(dark=True)
    try:
        at_night.open(site.url)
        assert at_night.run(ground) == dark, "the system's choice"
    finally:
        at_night.close()


def test_everything_has_a_name_and_a_place(page: Browser) -> None:
    """For readers of the screen, and for keyboards."""
    assert page.run(
        "['header', 'nav', 'main', 'footer', 'h1'].every((tag) => document.querySelectorAll(tag).length === 1)"
    )
    assert page.run(
        "[...document.querySelectorAll('section')].every((one) => byId(one.getAttribute('aria-labelledby'))?.textContent)"
    )
    nameless = (
        "[...document.querySelectorAll('input, select, textarea, button, meter')].filter((one) => "
        "!one.textContent.trim() && !one.getAttribute('aria-label') && !one.labels?.[0]?.textContent.trim()).map((one) => one.id) + ''"
    )
    assert page.run(nameless) == ""
    assert page.run("document.documentElement.lang") == "en"
    assert page.run("document.querySelectorAll('[role=log][aria-live=polite]').length") == 2
    assert page.run(
        "[...document.querySelectorAll('.scroll')].every((one) => one.tabIndex === 0 && one.getAttribute('aria-label'))"
    )
    assert page.run("[...document.querySelectorAll('th')].every((one) => one.scope)")


def test_a_page_that_nobody_looks_at_asks_for_nothing(page: Browser, site: Site) -> None:
    changed = "document.dispatchEvent(new Event('visibilitychange'))"
    page.run(f"Object.defineProperty(document, 'hidden', {{value: true, configurable: true}}); {changed}")
    page.until("feed.controller.signal.aborted")
    end = time.monotonic() + LIMIT_S
    while site.do(lambda: len(site.backend.feed._watchers)):
        assert time.monotonic() < end, "the frontend still makes snapshots"
    page.run(f"delete document.hidden; window.seen = feed.latest.number; {changed}")
    page.until("feed.latest.number > seen")
