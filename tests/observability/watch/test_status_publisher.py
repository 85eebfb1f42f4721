"""Status messages of agents to a launcher that displays them; without such a launcher they cost nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.observability import status_publisher
from shoal.observability.watch.live import StatusListener
from shoal.runtime.agent import current
from shoal.transport.listeners import listen_privately
from support.leftovers import nothing_is_left
from support.world import World

RING = {0: {1}, 1: {2}, 2: {0}}


@contextlib.contextmanager
def status_inbox() -> Iterator[tuple[str, Callable[[Callable[[dict[int, Any]], bool]], dict[int, Any]]]]:
    """Yield the path of a listener, and a function that waits until its last status messages are as required."""
    last: dict[int, dict[str, Any]] = {}
    inbox = StatusListener(lambda message: last.update({message["rank"]: message}), 16)

    def until(true: Callable[[dict[int, Any]], bool]) -> dict[int, Any]:
        limit = time.monotonic() + 20.0
        while not (last and true(last)):
            assert time.monotonic() < limit, last
            inbox.read()
            time.sleep(0.01)
        return last

    try:
        yield inbox.path, until
    finally:
        inbox.close()


def push_around_the_ring(steps: int) -> None:
    """Each sends to the next, and to nobody else."""
    rank, size = shoal.rank(), shoal.size()
    model = torch.nn.Linear(3, 1)
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        shoal.metrics({"loss": step + rank, "none": float("nan")})
    shoal.consensus_distance(model)
    shoal.neighbor_allreduce(torch.ones(8), 0.5, {(rank - 1) % size: 0.5}, {(rank + 1) % size: 1.0})


def is_last(message: dict[str, Any]) -> bool:
    """Whether the status comes after the last exchange: one in the middle of the first may have the same edges."""
    return "consensus distance" in message.get("measured", ()) and {*message.get("edges", ())} == RING[message["rank"]]


def test_a_launcher_receives_status_metrics_and_bytes_of_its_agents() -> None:
    with status_inbox() as (path, until), World(3, environment={"SHOAL_WATCH": path}) as world:
        world.results(push_around_the_ring, 4)
        output = until(lambda all_: len(all_) == 3 and all(is_last(one) for one in all_.values()))
        assert {rank: set(one["edges"]) for rank, one in output.items()} == RING
        for rank, one in output.items():
            assert one["pid"] == world.members[rank].pid and one["step"] == 4
            assert sum(nbytes for _, nbytes in one["sent"]) == one["bytes_sent"] > 32
            loss = one["measured"]["loss"]
            assert (loss["times"], loss["own"], loss["mean"], loss["worst"]) == (4, 3.0 + rank, 4.0, 5.0)
            assert one["measured"]["none"]["mean"] == "nan"  # JSON has no such number
            assert one["measured"]["consensus distance"]["mean"] >= 0.0
        world.results(shoal.shutdown)
        until(lambda all_: all(value["leaves"] for value in all_.values()))
        world.results(shoal.init)  # for the world's own end


def wait_for_the_others(seconds: float) -> None:
    if shoal.rank() == 0:
        time.sleep(seconds)
    shoal.barrier()


def test_a_waiting_agent_reports_its_missing_peers() -> None:
    with status_inbox() as (path, until), World(2, environment={"SHOAL_WATCH": path}) as world:
        pending = [world.run_on(rank, wait_for_the_others, 1.5) for rank in range(2)]
        output = until(lambda all_: 1 in all_ and bool(all_[1].get("waiting")))
        assert output[1]["waiting"][0]["ranks"] == [0] and output[1]["stands_still"]
        assert all(not one.outcome().error for one in pending)


def traffic() -> tuple[bool, dict[int, int], list[str]]:
    shoal.neighbor_allreduce(torch.ones(8))
    index = current().engine.sender.edge_counters
    return index.counts, index.bytes_to, [thread.name for thread in threading.enumerate() if "watch" in thread.name]


def test_without_an_observer_there_is_no_thread_and_no_counting() -> None:
    with World(2) as world:
        assert world.results(traffic) == [(False, {}, [])] * 2


ROUNDS = 300


def publish_continuously(path: str) -> bool:
    """Send many summaries during rounds; return whether counters are active afterwards."""
    agent = current()
    one = status_publisher.StatusPublisher(agent, path, seconds=0.001)
    for _ in range(ROUNDS):
        shoal.allreduce(torch.ones(1))
        time.sleep(0.002)
    one.close()
    return agent.engine.sender.edge_counters.counts


def test_observers_that_do_not_read_or_have_exited_block_nothing() -> None:
    result = listen_privately()
    assert result is not None
    listener, name = result
    with World(2) as world:
        path = f"/proc/{os.getpid()}/fd/{name}"
        assert world.results(publish_continuously, path) == [False, False]
        listener.close()
        assert {one.error for one in world.run(publish_continuously, path)} == {"ConnectionRefusedError"}
        os.close(name)


def test_a_launcher_that_has_exited_is_a_warning_and_no_error() -> None:
    with World(2, environment={"SHOAL_WATCH": "/proc/self/fd/9999"}) as world:
        assert world.results(traffic) == [(False, {}, [])] * 2
        assert "cannot send its status to its launcher" in world.members[0].log.read_text()


def test_status_messages_arrive_on_a_socket_that_only_this_user_can_reach() -> None:
    inbox = StatusListener(lambda message: None, 4)
    try:
        listener = Path(inbox.path)
        assert stat.S_ISSOCK(listener.stat().st_mode) and stat.S_IMODE(listener.stat().st_mode) == 0o600
        assert not Path(os.readlink(listener).removesuffix(" (deleted)")).exists()  # noqa: PTH115
    finally:
        inbox.close()


@pytest.mark.parametrize("packet", [b"", b"{", b"[" * 60_000, b"\x80\x04N.", b"3", b'{"a": ' + b"9" * 5000 + b"}"])
def test_non_json_values_are_skipped(packet: bytes) -> None:
    heard_: list[dict[str, Any]] = []
    with nothing_is_left():
        inbox = StatusListener(heard_.append, 2)
        socks = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(4)]
        for sock in socks:  # more than there is room for
            sock.connect(inbox.path)
            for _ in range(3):
                inbox.read()
        socks[-1].send(packet or b"{}")
        socks[-1].send(b'{"rank": 1}')
        for _ in range(4):
            inbox.read()
        assert heard_[-1] == {"rank": 1} and len(inbox._open) <= 2
        for sock in socks:
            sock.close()
        inbox.close()
