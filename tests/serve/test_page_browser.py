"""The web page in Chromium: tinted tokens stream in, the same prompt runs without speculation, charts, errors, keys.

Skipped where `/usr/bin/chromium` is missing, unless `FOREDRAFT_REQUIRE_BROWSER` is set, as it is in CI.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serve.scripted import CONTEXT, RunningServer, script

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
REQUIRED = bool(os.environ.get("FOREDRAFT_REQUIRE_BROWSER"))
TEXT = "oats, barley, rye; oats, barley, rye; wheat! oats, barley, rye; oats, barley, rye."

pytestmark = pytest.mark.skipif(
    not Path(CHROMIUM).exists() and not REQUIRED,
    reason=f"{CHROMIUM} is missing (apt-get install chromium)",
)


class Browser:
    """Opens pages, each in a browser with nothing in its profile, and notes what they ask for and complain of."""

    def __init__(self, playwright, profiles: Path) -> None:
        self._playwright = playwright
        self._profiles = profiles
        self._contexts: list = []
        self.complaints: list[str] = []
        self.requested: list[str] = []

    def open(self, url: str, width: int = 1280, height: int = 800, scheme: str = "light"):
        context = self._playwright.chromium.launch_persistent_context(
            self._profiles / str(len(self._contexts)),
            executable_path=CHROMIUM,
            args=FLAGS,
            viewport={"width": width, "height": height},
            color_scheme=scheme,
        )
        self._contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: message.type == "error" and self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requested.append(request.url))
        page.goto(url)
        page.wait_for_selector("#model:not(:empty)")
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = Browser(playwright, tmp_path)
        yield made
        made.close()


def send(page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def spans(page, box: str, kind: str = "span") -> list[str]:
    return page.locator(f"{box} .text {kind}").all_text_contents()


def test_both_runs_of_a_prompt(served: RunningServer, browser: Browser) -> None:
    page = browser.open(served.url)
    assert page.inner_text("#model") == "scripted"
    assert page.is_visible("#empty")
    assert page.get_attribute("#positions", "aria-label") == "No drafts yet"
    page.check("#beside")
    served.llm.model.delay = 0.03
    try:
        send(page, script(TEXT))
        page.wait_for_selector(".assistant .text span")
        begun = "".join(spans(page, ".assistant:not(.plain)"))
        assert begun
        assert begun != TEXT
        assert TEXT.startswith(begun)
        assert page.is_visible("#stop")
        page.wait_for_selector(".verdict")
    finally:
        served.llm.model.delay = 0.0

    assert page.inner_text(".verdict").endswith("The two texts are the same.")
    drafted, plain = ".assistant:not(.plain)", ".assistant.plain"
    assert "".join(spans(page, drafted)) == "".join(spans(page, plain)) == TEXT
    for kind in ("a", "r", "b", "t"):
        assert spans(page, drafted, f".{kind}"), f"no token of origin {kind}"
    assert spans(page, plain, ".t") == spans(page, plain)
    tints = {page.eval_on_selector(f"{drafted} .{kind}", "e => getComputedStyle(e).backgroundColor") for kind in "arbt"}
    assert len(tints) == 4

    # What the page counts is what the server says.
    accepted, drafts = len(spans(page, drafted, ".a")), page.locator("#lengths rect.drafted")
    lengths = [re.fullmatch(r"step \d+: (\d+) of (\d+) accepted", each) for each in drafts.all_text_contents()]
    assert sum(int(found[1]) for found in lengths if found) == accepted
    assert max(int(found[2]) for found in lengths if found) == 4
    assert page.inner_text("#rate") == f"{round(100 * accepted / sum(int(found[2]) for found in lengths if found))}%"
    positions = page.locator("#positions rect.accepted").all_text_contents()
    assert len(positions) == 4
    assert sum(int(re.search(r": (\d+) of", each)[1]) for each in positions) == accepted  # type: ignore[index]
    assert page.get_attribute("#lengths", "aria-label").startswith("Chosen γ in ")
    assert float(page.inner_text("#tau")) > 1
    for speed in ("#speed", "#plain-speed"):
        assert float(page.inner_text(speed)) > 0

    assert browser.complaints == []
    assert {url for url in browser.requested if not url.startswith((served.url, "data:"))} == set()


def test_speculation_alone_then_off(served: RunningServer, browser: Browser) -> None:
    page = browser.open(served.url)
    page.click("#settings summary")
    page.fill("#gamma", "0")
    page.press("#gamma", "Enter")
    assert not page.is_visible("#gamma")
    send(page, script(TEXT))
    page.wait_for_selector(".assistant .text span")
    page.wait_for_selector("#send:visible")
    assert page.locator(".assistant").count() == 1
    assert spans(page, ".assistant", ".t") == spans(page, ".assistant")
    assert page.inner_text("#rate") == "–"
    page.click("#reset")
    assert page.is_visible("#empty")
    assert page.locator(".turn").count() == 0


def test_what_goes_wrong_is_said_and_can_be_tried_again(served: RunningServer, browser: Browser) -> None:
    page = browser.open(served.url, height=360)
    admitted, served.state.num_admitted = served.state.num_admitted, 10**6
    send(page, script("back again"))
    page.wait_for_selector(".failure")
    served.state.num_admitted = admitted
    assert page.inner_text(".failure strong") == "The server is busy"
    assert page.locator(".assistant").count() == 0, "no empty box is left"
    assert page.locator(".failure button").evaluate("e => e.getBoundingClientRect().bottom") < 360
    page.click(".failure button")
    page.wait_for_selector(".foot:has-text('10 tokens')")
    assert "".join(spans(page, ".assistant")) == "back again"
    assert page.locator(".failure").count() == 0

    page.click("#settings summary")
    page.fill("#tokens", str(CONTEXT))
    send(page, script("x"))
    page.wait_for_selector(".failure")
    assert page.inner_text(".failure strong") == "The server refused the request"
    assert str(CONTEXT) in page.inner_text(".failure p")


def test_a_server_that_is_gone(browser: Browser) -> None:
    with RunningServer() as server:
        page = browser.open(server.url)
    send(page, script("x"))
    page.wait_for_selector(".failure")
    assert page.inner_text(".failure strong") == "The server does not answer"
    assert page.is_visible("#send")


def test_a_key_is_asked_for(browser: Browser) -> None:
    with RunningServer({"api_key": ("secret",)}) as server:
        page = browser.open(server.url)
        page.wait_for_selector("#key:visible")
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.wait_for_selector("#model:text-is('scripted')")
        send(page, script("in"))
        page.wait_for_selector("#send:visible")
        page.wait_for_selector(".assistant .foot:has-text('2 tokens')")
        assert "".join(spans(page, ".assistant")) == "in"


def test_escape_stops_and_what_is_there_stays(served: RunningServer, browser: Browser) -> None:
    page = browser.open(served.url)
    served.llm.model.delay = 0.05
    try:
        send(page, script(TEXT))
        page.wait_for_selector(".assistant .text span")
        page.keyboard.press("Escape")
        page.wait_for_selector("#send:visible")
        served.wait_until_idle()
    finally:
        served.llm.model.delay = 0.0
    stopped = "".join(spans(page, ".assistant"))
    assert TEXT.startswith(stopped)
    assert stopped != TEXT
    assert "not complete" in page.inner_text(".foot")
    assert page.locator(".failure").count() == 0
    assert page.evaluate("document.activeElement.id") == "prompt"


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1280, "dark")])
def test_nothing_is_wider_than_the_window(served: RunningServer, browser: Browser, width: int, scheme: str) -> None:
    page = browser.open(served.url, width, scheme=scheme)
    page.check("#beside")
    send(page, script("wide" * 60))
    page.wait_for_selector(".verdict")
    if width < 800:
        page.click("#charts summary")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.eval_on_selector("#talk", "talk => talk.scrollWidth <= talk.clientWidth")
    page_color = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", page_color)[:3]))
    assert (brightness < 200) == (scheme == "dark")
