"""A real browser, and pages opened in it that must neither complain nor ask for anything."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

OUR_READING = "willReadFrequently"
"""In what Chromium says when these tests look at the pixels of a chart."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def running_browser() -> Iterator[Any]:
    """Chromium; the test is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: dev)")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no browser was found: apt-get install chromium")
    with api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, path: Path, width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    """The page of a file. On leaving: it has asked for nothing but itself, and no script has complained."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, requests, complaints = context.new_page(), [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: OUR_READING not in message.text and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    until(page, "charts.every((chart) => chart.uplot || !chart.plot.clientWidth)")
    yield page
    context.close()
    assert complaints == []
    assert requests == [path.as_uri()]


def until(page: Any, condition: str) -> None:
    """Wait for it. The page forbids the evaluation by which the library's own waiting is done."""
    deadline = time.monotonic() + 30
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def painted(page: Any, chart: int, step: float, value: float, scale: str = "y") -> bool:
    """Whether something is drawn at this place of a chart: a pixel that is not transparent."""
    return page.evaluate(
        """([place, step, value, scale]) => {
          const u = charts[place].uplot;
          const at = [u.valToPos(step, "x", true), u.valToPos(value, scale, true)].map(Math.round);
          return u.ctx.getImageData(...at, 1, 1).data[3] > 0;
        }""",
        [chart, step, value, scale],
    )


def chart_named(page: Any, title: str) -> int:
    """Place of a chart among those of the page."""
    place = page.evaluate("(title) => charts.findIndex((chart) => chart.title === title)", title)
    assert place >= 0, title
    return place
