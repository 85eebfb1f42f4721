"""A notebook without its browser: runs cells in an IPython shell, and prints what became of each as a line of JSON.

``python notebook_cells.py PROFILE < cells.json``
"""

from __future__ import annotations

import json
import sys
import time

import ipyparallel
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output


def wait_for_subscription(client: ipyparallel.Client, seconds: float = 60.0) -> None:
    """Wait until output arrives: an engine's output is lost until the client's subscription has reached it."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        printed = client[:].execute("print('output arrives')", silent=False, block=False)
        printed.get(seconds)
        printed.wait_for_output(1.0)
        if all(printed.stdout):
            return
    raise TimeoutError("no output of the engines arrives")


if __name__ == "__main__":
    shell = InteractiveShell.instance(colors="nocolor", history_length=0)
    with ipyparallel.Client(profile=sys.argv[1], timeout=30) as client:
        client.activate()
        wait_for_subscription(client)
        for cell in json.load(sys.stdin):
            began = time.monotonic()
            with capture_output() as captured:
                result = shell.run_cell(cell)
                for one in captured.outputs:
                    one.display()
            error = result.error_before_exec or result.error_in_exec
            # The text that %%px shows of an error may come after the cell has ended, and is then lost.
            remote = getattr(getattr(error, "original_error", error), "elist", [])
            outcome = {
                "message": captured.stdout + captured.stderr,
                "error": "" if error is None else str(error),
                "raised": [f"{name}: {message}" for name, message, *_ in remote],
                "seconds": time.monotonic() - began,
            }
            print(json.dumps(outcome), flush=True)
