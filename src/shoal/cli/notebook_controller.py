"""ipyparallel's controller, whose own processes end with it in all cases."""

from __future__ import annotations

import multiprocessing
import os
import sys

from .agent_processes import death_with

# An engine counts after two heartbeats, by default every three seconds; it is lost after half a minute.
_OPTIONS = (
    "--IPController.use_threads=True",
    "--IPController.enable_curve=True",  # every user of this machine can connect to its ports
    "--HeartMonitor.period=1000",
    "--HeartMonitor.max_heartmonitor_misses=30",
)


def main(arguments: list[str]) -> None:
    """Run a controller until it is ended."""
    from ipyparallel.controller.app import IPController

    # It starts processes of its own (the monitor of the heartbeats), which would outlive a controller that is
    # killed. A forked child can make the kernel kill it with its parent, too.
    multiprocessing.set_start_method("fork")
    os.register_at_fork(after_in_child=death_with(os.getpid()))
    IPController.launch_instance([*arguments, *_OPTIONS])


if __name__ == "__main__":
    main(sys.argv[1:])
