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

if __name__ == "__main__":
    shell = InteractiveShell.instance(colors="nocolor", history_length=0)
    with ipyparallel.Client(profile=sys.argv[1], timeout=30) as client:
        client.activate()
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
