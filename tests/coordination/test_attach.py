"""Who moves tensors: a group that the script has, those that Shoal makes beside it, and what is refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shoal
from shoal.cli import certificates
from shoal.engine.operation import Carried, Exchange
from shoal.transport.wire import Kind, Message, ProtocolError, Where
from shoal.world.agent import current
from support import PROCESS_GROUP
from support.namespaces import network_namespaces
from support.world import World

pytestmark = pytest.mark.transport(PROCESS_GROUP)
SIZE = 3
BY_GROUPS = {"SHOAL_TRANSPORT": PROCESS_GROUP}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def with_a_group_of_its_own(rank: int, port: int) -> list[float]:
    """What averages give over the script's group, and what the script still has of it afterwards."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE)
    shoal.init(shoal.RingGraph, process_group=dist.new_group())
    assert current().engine.carrier is not None
    x = torch.full((50_000,), float(rank))
    found = [shoal.neighbor_allreduce(x)[0].item(), shoal.allreduce(x)[0].item()]
    if rank < 2:  # of these two Shoal makes one
        found.append(shoal.allreduce(x, False, group=[0, 1])[0].item())
    shoal.shutdown()
    y = torch.ones(2)
    dist.all_reduce(y)
    found.append(y[0].item())
    dist.destroy_process_group()
    return found


def test_a_group_of_the_scripts_own_moves_tensors_and_stays_the_scripts() -> None:
    with World(SIZE, environment=BY_GROUPS, init=False) as world:
        port = free_port()
        pending = [world.run_on(rank, with_a_group_of_its_own, rank, port) for rank in range(SIZE)]
        found = [one.outcome().value for one in pending]
    assert found == [[1.0, 1.0, 1.0, 3.0], [1.0, 1.0, 1.0, 3.0], [1.0, 1.0, 3.0]]


def with_a_group_of_some(rank: int, port: int) -> str:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE)
    group = dist.new_group([0, 1])
    try:
        shoal.init(process_group=dist.group.WORLD if rank == 2 else group)
    except (ValueError, RuntimeError, shoal.ShoalError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()
    return "it began"


def test_a_group_of_some_agents_is_refused() -> None:
    with World(SIZE, environment=BY_GROUPS | {"SHOAL_TIMEOUT": "5"}, init=False) as world:
        port = free_port()
        pending = [world.run_on(rank, with_a_group_of_some, rank, port) for rank in range(SIZE)]
        found = [one.outcome(60).value for one in pending]
    for rank in (0, 1):
        assert f"this is rank {rank} of 2 in that group, and rank {rank} of 3 agents" in found[rank], found
    assert found[2] != "it began"


def begin() -> str:
    try:
        shoal.init()
    except ValueError as error:
        return str(error)
    return "it began"


def test_between_machines_it_is_refused_together_with_tls(tmp_path: Path) -> None:
    certificates.make(tmp_path / "made", 2)
    secured = {"SHOAL_TLS": "on", "SHOAL_CERTIFICATES": str(tmp_path / "made")}
    with (
        network_namespaces(2) as machines,
        World(2, environment=BY_GROUPS | secured, namespaces=machines, init=False) as world,
    ):
        found = [one.value for one in world.run(begin)]
    assert all("what a process group of gloo sends to ranks" in said and "is not encrypted" in said for said in found)


def test_what_nothing_would_move_is_no_message_of_ours() -> None:
    def run() -> None:
        message = Message(Kind.DATA, "neighbor_allreduce", "x", where=Where.CARRIED, nbytes=8)
        with pytest.raises(ProtocolError, match="travels over an engine that there is not"):
            current().engine.lifecycle.check_carried(message)

    shoal.Fleet(2).run(run)


def test_nor_is_a_tensor_larger_than_this_machines_memory() -> None:
    def run() -> None:
        message = Message(Kind.DATA, "neighbor_allreduce", "x", where=Where.CARRIED, nbytes=1 << 50)
        with pytest.raises(ProtocolError, match="more than this machine has"):
            current().engine.lifecycle.check_carried(message)

    shoal.Fleet(2, transport=PROCESS_GROUP).run(run)


def test_an_exchange_that_is_not_said_to_be_carried_goes_by_links() -> None:
    assert Exchange((), ()).carried is None
    assert Carried().among == ()
