"""Takes docs/images/watch.png: the page of a run of four agents, after one was killed.

    python docs/watch_picture.py

It needs chromium and chromedriver, as the test of the page does.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import browser  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "watch.png"
LONG = 12.0
"""Seconds for which it trains, before the loss and after it."""
CELL = "return document.querySelector('#agents tbody tr[data-rank=\"2\"]').{}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        stop = Path(folder, "stop")
        run = [sys.executable, "-m", "shoal", "run", "--watch", "-n", "4", "--on-failure", "continue"]
        job = subprocess.Popen(
            [*run, str(ROOT / "tests" / "observability" / "watch" / "train.py"), str(stop)],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert job.stderr is not None
            address = next(found[0] for line in job.stderr if (found := re.search(r"http://\S+", line)))
            with browser(1180, 1040) as page:
                page.scheme("light")
                page.open(address)
                loss = "return document.querySelector('[data-figure=\"loss, mean\"] b').textContent"
                page.until(loss, lambda text: text.startswith(tuple("0123456789")), 90.0)
                time.sleep(LONG)
                os.kill(int(page.run(CELL.format("cells[7].textContent")).split(", ")[1]), signal.SIGKILL)
                page.until(CELL.format("dataset.state"), lambda state: state == "lost")
                time.sleep(LONG)
                page.until(
                    "return [...document.querySelectorAll('#agents tbody tr')].map(row => row.dataset.state)",
                    lambda states: "waiting" in states and "computing" in states,
                )
                page.picture(PICTURE)
            stop.touch()
            job.communicate(timeout=60)
        finally:
            job.kill()
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
