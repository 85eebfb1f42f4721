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
            told = "" if error is None else "\n".join(str(one) for one in getattr(error, "elist", [error]))
            print(
                json.dumps(
                    {"said": captured.stdout + captured.stderr, "error": told, "seconds": time.monotonic() - began}
                ),
                flush=True,
            )
