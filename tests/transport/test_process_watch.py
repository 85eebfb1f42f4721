"""Whose process is watched."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from shoal.transport.peer_address import ProcessWatch, local_peer_id
from shoal.transport.poller import Poller


def test_a_number_of_another_pid_namespace_is_not_taken_for_a_process_of_this_one() -> None:
    """Agents in two containers of one pod are both process 1, and may have started in the same tick of the clock."""
    mine = local_peer_id(0)
    with closing(Poller()) as poller, closing(ProcessWatch(poller, lambda rank: None)) as processes:
        processes.watch(mine)
        processes.watch(replace(mine, rank=1, pid_namespace=mine.pid_namespace + 1))
        assert 0 in processes
        assert 1 not in processes
