"""The site's search finds what readers look for. Skipped unless ``make docs`` has built it and there is a browser."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.browser import MISSING, Browser, browser

ROOT = Path(__file__).parents[1]
SITE = ROOT / "out" / "site"
FIRST = 5
"""How many results count."""
EXPECTED = {
    "how to install": ("installation",),
    "PeerLost": ("troubleshooting", "reference/shoal"),
    "neighbor_allreduce": ("reference/shoal",),
    "ports": ("howto/machines",),
    "move a DDP script": ("howto/ddp",),
    "write an algorithm": ("howto/extend",),
}
"""Questions, and the pages of which one must be among the first results."""
ANSWERS = {
    "installation": "pip install .",
    "howto/ddp": "add three lines and remove one",
    "troubleshooting": "An agent that is still needed has failed",
    "reference/shoal": 'id="shoal.neighbor_allreduce"',
    "howto/machines": "Between machines these are needed",
    "howto/extend": "This is a complete algorithm",
}
"""Pages that answer the questions, and a part of the answer."""


@pytest.mark.parametrize("page", ANSWERS)
def test_the_page_of_an_answer_is_two_clicks_from_the_start(page: str) -> None:
    """A click on a tab and one on the page: it is not in a group of the tab."""
    config = (ROOT / "mkdocs.yml").read_text()
    assert re.search(rf"^      - (?:[^:\n]+: )?{page}\.md$", config, re.MULTILINE)
    source = ROOT / "docs" / f"{page}.md"
    if source.exists():
        assert ANSWERS[page] in " ".join(source.read_text().split())


@pytest.mark.skipif(not (SITE / "search").exists(), reason="`make docs` has not built the site")
@pytest.mark.parametrize("page", ANSWERS)
def test_the_page_of_the_site_has_the_answer(page: str) -> None:
    assert ANSWERS[page] in " ".join((SITE / page / "index.html").read_text().split())


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with browser() as one:
            one.open(f"http://127.0.0.1:{server.server_port}/index.html")
            yield one
        server.shutdown()


def results(page: Browser, question: str) -> list[str]:
    """The pages of the first results, in order."""
    links = "return [...document.querySelectorAll('.md-search-result__list > li > a')].map(one => one.href)"
    typed = (
        "const field = document.querySelector('[data-md-component=search-query]'); field.focus();"
        "field.value = {}; field.dispatchEvent(new Event('keyup', {{bubbles: true}}));"
    )
    page.run(typed.format("''"))
    page.until(links, lambda found: not found)
    page.run(typed.format(json.dumps(question)))
    result = page.until(links)
    paths = [urlsplit(one).path.strip("/").removesuffix("index.html").strip("/") or "index" for one in result]
    return paths[:FIRST]


@pytest.mark.parametrize("question", EXPECTED)
@pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is a browser")
@pytest.mark.skipif(not (SITE / "search").exists(), reason="`make docs` has not built the site")
def test_the_search_finds_the_page(page: Browser, question: str) -> None:
    result = results(page, question)
    assert set(EXPECTED[question]) & set(result), result
