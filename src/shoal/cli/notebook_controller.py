"""ipyparallel's controller, whose own processes end with it, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import sys

from .agent_processes import death_with

# An engine is there when its heart has beaten twice, by default every three seconds; it is gone after half a minute.
_OPTIONS = (
    "--IPController.use_threads=True",
    "--IPController.enable_curve=True",  # whoever is on this machine can connect to its ports
    "--HeartMonitor.period=1000",
    "--HeartMonitor.max_heartmonitor_misses=30",
)


def main(arguments: list[str]) -> None:
    """Be a controller until told to end."""
    from ipyparallel.controller.app import IPController

    # It starts processes of its own (the monitor of the engines' hearts), which would outlive a controller that is
    # killed. A forked child can ask the kernel for the same as its parent has.
    multiprocessing.set_start_method("fork")
    os.register_at_fork(after_in_child=death_with(os.getpid()))
    IPController.launch_instance([*arguments, *_OPTIONS])


if __name__ == "__main__":
    main(sys.argv[1:])
