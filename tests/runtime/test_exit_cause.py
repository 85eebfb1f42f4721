"""An agent's goodbye message arrives exactly once, however late; it is not counted before, and nothing follows it."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch

import shoal
from shoal.engine.shutdown import Shutdown
from shoal.transport.messages import Kind, Message
from shoal.transport.router import Router
from shoal.transport.sockets import Outgoing
from support.limits import scaled

SIZE = 8
SENDER, RECEIVER = 0, 3  # of the star, and of nothing before


@pytest.mark.transport("network")
@pytest.mark.parametrize("others_leave", [False, True])
def test_a_departing_agent_does_not_count_as_gone_before_its_messages_have_arrived(
    others_leave: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receiver is so busy that its connection does not exist yet when the sender notifies others of its exit."""
    made = Router.outgoing
    opens: list[float] = []

    def delayed_link(self: Router, peer: int, *rest: Any) -> Outgoing:
        link = made(self, peer, *rest)
        if (self.rank, peer) == (SENDER, RECEIVER):
            opens.append(time.monotonic() + 1.5)
            greet = link._greet
            monkeypatch.setattr(link, "_greet", lambda: greet() if time.monotonic() > opens[0] else time.sleep(0.01))
        return link

    monkeypatch.setattr(Router, "outgoing", delayed_link)

    def run() -> list[float]:
        sums = []
        for graph in (
            shoal.topology.ExponentialTwoGraph(SIZE),
            shoal.topology.StarGraph(SIZE),
            shoal.topology.MeshGrid2DGraph(SIZE),
        ):
            shoal.set_topology(graph)
            sums.append(shoal.neighbor_allgather(torch.tensor([float(shoal.rank())])).sum().item())
        if shoal.rank() not in (SENDER, RECEIVER) and not others_leave:
            time.sleep(2.0)  # they learn that the sender leaves, and confirm it
        return sums

    results = shoal.Fleet(SIZE, transport="network", timeout=20.0).run(run)
    assert opens
    assert [star for _, star, _ in results] == [28.0, *[0.0] * (SIZE - 1)]  # and nobody had an error


@pytest.mark.transport("network")
def test_messages_queued_after_the_exit_message_are_not_delivered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that received the exit message has closed, and forgets its offset. A new connection would repeat all."""
    send_shutdown = Shutdown._send_shutdown
    cut: list[int] = []
    once_more = Router._cut

    def record_link(self: Router, link: Outgoing, cause: str, at_once: bool) -> None:
        if self.rank == 1 and link.peer == 0 and not link.idle:
            cut.append(link.peer)
        once_more(self, link, cause, at_once)

    def say_more(self: Shutdown, why: str, died: bool) -> None:
        send_shutdown(self, why, died)
        if self._parts.rank == 1:  # and not handed to the system yet when the other hangs up
            self._parts.router.links[0].post(Message(Kind.NOTICE, round=1, token=1, text="as I said"))

    monkeypatch.setattr(Shutdown, "_send_shutdown", say_more)
    monkeypatch.setattr(Router, "_cut", record_link)

    def run() -> list[float]:
        rank = shoal.rank()
        if rank == 2:
            time.sleep(1.5)
        # Rank 0 has all that it wants at once, and waits for rank 2 to confirm what goes there.
        sources, targets = [[1], [], [0]][rank], [[2], [0], []][rank]
        got = shoal.neighbor_allgather(torch.full((2,), float(rank)), src_ranks=sources, dst_ranks=targets)
        return got.tolist()

    began = time.monotonic()
    results = shoal.Fleet(3, transport="network", timeout=20.0).run(run)
    assert cut, "nothing was queued when rank 0 hung up"
    assert results == [[1.0, 1.0], [], [0.0, 0.0]]
    assert time.monotonic() - began < scaled(8.0)


FLEETS = """
import sys, time, torch, shoal
from shoal import topology

def run():
    for graph in (topology.ExponentialTwoGraph(8), topology.StarGraph(8), topology.MeshGrid2DGraph(8)):
        shoal.set_topology(graph)
        shoal.neighbor_allgather(torch.ones(2, 3))

ends, runs = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < ends:
    shoal.Fleet(8, transport="network", timeout=20.0).run(run)
    runs += 1
print(runs)
"""


@pytest.mark.soak
@pytest.mark.transport("network")
def test_fleets_on_an_overloaded_machine_end_without_an_error() -> None:
    """Eighty agents on one or two cores, where a thread may be ready for longer than any timeout."""
    command = [sys.executable, "-c", FLEETS, "80"]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(10)
    ]
    try:
        for process in processes:
            output, complained = process.communicate(timeout=scaled(300))
            assert process.returncode == 0, complained[-2000:]
            assert int(output) > 10
    finally:
        for process in processes:
            with process:
                process.kill()
