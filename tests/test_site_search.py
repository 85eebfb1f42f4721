"""The site's search finds what readers look for. Skipped unless ``make docs`` has built it and there is a browser."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.browser import MISSING, Browser, browser

SITE = Path(__file__).parents[1] / "out" / "site"
FIRST = 5
"""How many results count."""
EXPECTED = {
    "how to install": ("installation",),
    "PeerLost": ("troubleshooting", "reference/shoal"),
    "neighbor_allreduce": ("reference/shoal",),
    "ports": ("launching",),
    "move a DDP script": ("training", "index"),
    "write an algorithm": ("algorithms",),
}
"""Questions, and the pages of which one must be among the first results."""

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is a browser"),
    pytest.mark.skipif(not (SITE / "search").exists(), reason="`make docs` has not built the site"),
]


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
    found = page.until(links)
    paths = [urlsplit(one).path.strip("/").removesuffix("index.html").strip("/") or "index" for one in found]
    return paths[:FIRST]


@pytest.mark.parametrize("question", EXPECTED)
def test_the_search_finds_the_page(page: Browser, question: str) -> None:
    found = results(page, question)
    assert set(EXPECTED[question]) & set(found), found
