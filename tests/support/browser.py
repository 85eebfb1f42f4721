"""A real browser without a window, driven through chromedriver's own HTTP interface: no package is needed for it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "" if CHROMIUM and DRIVER else "there is no chromium and no chromedriver (apt-get install chromium-driver)"
"""Why there can be no browser; empty where there can."""
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)
_PATIENCE = 30.0


class Browser:
    """One session."""

    def __init__(self, port: int, options: dict[str, Any]) -> None:
        self._base = f"http://127.0.0.1:{port}"
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        session = self._ask("POST", "/session", {"capabilities": wanted})["sessionId"]
        self._base += f"/session/{session}"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()}") from None

    def open(self, address: str) -> None:
        self._ask("POST", "/url", {"url": address})

    def run(self, script: str) -> Any:
        """The result of a function body run in the page."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def tell(self, command: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def resize(self, width: int, height: int) -> None:
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """``"light"`` or ``"dark"``."""
        self.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def complaints(self) -> list[str]:
        """The console's messages since the last call, without harmless ones."""
        lines = self._ask("POST", "/se/log", {"type": "browser"})
        return [line["message"] for line in lines if line["level"] not in ("DEBUG", "INFO")]

    def until(self, script: str, true: Callable[[Any], bool] = bool, seconds: float = _PATIENCE) -> Any:
        """Run the script until its result is as required; return the result."""
        limit = time.monotonic() + seconds
        while not true(results := self.run(script)):
            assert time.monotonic() < limit, f"{script} gives {results!r}"
            time.sleep(0.05)
        return results

    def picture(self, path: Path) -> None:
        """Of what can be seen, as PNG."""
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def close(self) -> None:
        self._ask("DELETE", "")


@contextlib.contextmanager
def browser(width: int = 1200, height: int = 900) -> Iterator[Browser]:
    """A new browser, with an empty profile that is removed afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        options = {"binary": CHROMIUM, "args": [*_OPTIONS, f"--user-data-dir={profile}"]}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        driver = subprocess.Popen([str(DRIVER), f"--port={port}"], start_new_session=True, **quiet)  # type: ignore[call-overload]
        try:
            limit = time.monotonic() + _PATIENCE
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert time.monotonic() < limit, "chromedriver does not listen"
                time.sleep(0.05)
            one = Browser(port, options)
            one.resize(width, height)
            yield one
            one.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, 9)
            driver.wait()
