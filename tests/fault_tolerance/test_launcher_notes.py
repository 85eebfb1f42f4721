"""The marker of an agent that waits to be admitted, as its launcher sees it."""

from __future__ import annotations

import os
import subprocess
import sys

from shoal.fault_tolerance.launcher_notes import RejoinMarker, is_marked
from support.leftovers import nothing_is_left


def test_the_marker_of_a_process_is_visible_until_it_is_removed() -> None:
    with nothing_is_left():
        sign = RejoinMarker()
        assert not is_marked(os.getpid()) and not sign.descriptors()
        sign.show()
        assert is_marked(os.getpid()) and not is_marked(os.getppid())
        [descriptor] = sign.descriptors()
        assert not os.get_inheritable(descriptor), "what an agent starts does not wait outside"
        sign.hide()
        sign.hide()
        assert not is_marked(os.getpid()) and not sign.descriptors()


def test_the_marker_of_an_ended_process_is_not_visible() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import os; os.memfd_create('shoal-outside'); os._exit(0)"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_marked(process.pid)
    process.wait()
    assert not is_marked(process.pid)
