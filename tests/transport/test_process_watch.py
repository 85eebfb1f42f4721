"""Whose process is watched."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from dataclasses import replace

from shoal.transport.peer_address import ProcessWatch, local_peer_id, process_start
from shoal.transport.poller import Poller


def test_a_pid_of_another_namespace_is_not_taken_for_a_local_process() -> None:
    """Agents in two containers of one pod both have PID 1, and may have started in the same clock tick."""
    own = local_peer_id(0)
    with closing(Poller()) as poller, closing(ProcessWatch(poller, lambda rank: None)) as processes:
        processes.watch(own)
        processes.watch(replace(own, rank=1, pid_namespace=own.pid_namespace + 1))
        assert 0 in processes
        assert 1 not in processes


def test_the_end_of_a_process_read_in_the_poll_that_admits_the_next_one_of_its_rank_is_void() -> None:
    own, ended = local_peer_id(0), list[int]()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        before = replace(own, rank=1, pid=child.pid, started=process_start(child.pid))
        with closing(Poller()) as poller, closing(ProcessWatch(poller, ended.append)) as processes:
            processes.watch(before)
            child.kill()
            due = poller.poll(20.0)
            processes.forget(1)  # as at an admission, by the callback before
            processes.watch(replace(own, rank=1))
            for callback, events in due:
                callback(events)
            assert due and not ended and 1 in processes
