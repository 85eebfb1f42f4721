"""An engine of ipyparallel that is an agent: it runs the cells of a notebook, and notifies the other agents when one
fails.

After a cell has raised, its engine is alive and idle, and an agent that waits for it would wait until its deadline. So
while an engine is idle after a failure it checks whether others wait for it. After two seconds of such a wait it
leaves, and the others get :class:`~shoal.PeerLost` with the cell's exception. If no agent waits, as after the same
error in all engines, it stays.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

_LOOK_SECONDS = 0.05
_GRACE_SECONDS = 2.0
"""How long others wait for an idle engine before it leaves. Engines begin the next cell at different times; without
this the first one to begin would lose the last one."""


class CellWatch:
    """Watches over the cells of this process, from the events of its IPython shell."""

    def __init__(self) -> None:
        self._next_cell = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, *_: Any) -> None:
        """Called when a cell begins: what others wait for may come yet."""
        self._next_cell.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def end(self, result: Any) -> None:
        """Called when a cell has ended: if it failed and others wait for this agent, it leaves."""
        error = result.error_before_exec or result.error_in_exec
        if error is None or self._thread is not None:
            return
        self._next_cell.clear()
        cause = f"its cell raised {type(error).__name__}: {error}".splitlines()[0][:500]
        self._thread = threading.Thread(target=self._look, args=(cause,), name="shoal-cells", daemon=True)
        self._thread.start()

    def _look(self, cause: str) -> None:
        from ..runtime.agent import process_context
        from ..runtime.bootstrap import leave

        waited_for_since = None
        while True:
            agent = process_context().agent
            if agent is None:
                return
            with agent.engine.lock:
                is_waited_for = agent.engine.is_waited_for()
            if not is_waited_for:
                waited_for_since = None
            elif waited_for_since is None:
                waited_for_since = time.monotonic()
            elif time.monotonic() - waited_for_since >= _GRACE_SECONDS:
                leave(process_context(), cause, died=True)
                return
            if self._next_cell.wait(_LOOK_SECONDS):
                return


def watch_cells(shell: Any) -> None:
    """Watch every cell of an IPython shell."""
    watch = CellWatch()
    shell.events.register("pre_run_cell", watch.begin)
    shell.events.register("post_run_cell", watch.end)


def main(arguments: list[str]) -> None:
    """Run an engine until it is ended."""
    from ipyparallel.engine.app import IPEngine

    from shoal import init  # noqa: F401 - and all with it: before it takes cells, since the first would wait for torch

    startup = "__import__('shoal.cli.notebook_engine').cli.notebook_engine.watch_cells(get_ipython())"
    IPEngine.launch_instance([*arguments, f"--IPEngine.startup_command={startup}"])


if __name__ == "__main__":
    main(sys.argv[1:])
