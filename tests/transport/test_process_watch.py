"""Whose process is watched."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from shoal.transport.peer_address import ProcessWatch, local_peer_id
from shoal.transport.poller import Poller


def test_a_pid_of_another_namespace_is_not_taken_for_a_local_process() -> None:
    """Agents in two containers of one pod both have PID 1, and may have started in the same clock tick."""
    own = local_peer_id(0)
    with closing(Poller()) as poller, closing(ProcessWatch(poller, lambda rank: None)) as processes:
        processes.watch(own)
        processes.watch(replace(own, rank=1, pid_namespace=own.pid_namespace + 1))
        assert 0 in processes
        assert 1 not in processes
