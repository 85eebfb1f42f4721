"""The backend that moves tensors: a group of the script's own, groups that Shoal makes, and refused groups."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import shoal
from shoal.cli import certificates
from shoal.coordination.attach import check_backend
from shoal.errors import ProtocolError
from shoal.execution.stage import BackendRequest, Exchange
from shoal.runtime.agent import current
from shoal.transport.messages import Kind, Message, Where
from shoal.transport.process_group import available
from support import PROCESS_GROUP
from support.limits import scaled
from support.namespaces import network_namespaces
from support.world import World, plain_environment

pytestmark = pytest.mark.transport(PROCESS_GROUP)
SIZE = 3
BY_GROUPS = {"SHOAL_TRANSPORT": PROCESS_GROUP}


def requires_backend(engine: str) -> pytest.MarkDecorator:
    """Passes over a test of an engine that this build of torch has not."""
    return pytest.mark.skipif(engine not in available(), reason=f"this build of torch has no {engine}")


def by_script(script: str) -> list[str]:
    """What each of three processes prints that a launcher has told who they are."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    about = {
        "WORLD_SIZE": f"{SIZE}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
        "SHOAL_TIMEOUT": "20",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            env=plain_environment() | BY_GROUPS | about | {"RANK": str(rank), "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    output = [process.communicate(timeout=scaled(50)) for process in processes]
    assert [process.returncode for process in processes] == [0] * SIZE, output
    return [out.strip() for out, _ in output]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["gloo", pytest.param("ucc", marks=requires_backend("ucc"))])
def test_the_scripts_own_group_moves_tensors_and_is_not_destroyed(engine: str) -> None:
    output = by_script(
        f"""
        import torch, torch.distributed as dist, shoal
        dist.init_process_group("{engine}")
        shoal.init(shoal.topology.RingGraph, process_group=dist.new_group())
        x = torch.full((50_000,), float(shoal.rank()))
        found = [shoal.neighbor_allreduce(x)[0].item(), shoal.allreduce(x)[0].item()]
        if shoal.rank() < 2:  # of these two Shoal makes one
            found.append(shoal.allreduce(x, False, group=[0, 1])[0].item())
        shoal.shutdown()
        y = torch.ones(2)
        dist.all_reduce(y)
        print(*found, y[0].item())
        dist.destroy_process_group()
        """
    )
    assert output == ["1.0 1.0 1.0 3.0", "1.0 1.0 1.0 3.0", "1.0 1.0 3.0"]


@requires_backend("ucc")
def test_ucc_groups_created_by_shoal_give_the_bits_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[torch.Tensor]:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        x = torch.randn(50_000, generator=torch.Generator().manual_seed(shoal.rank()))
        return [shoal.neighbor_allreduce(x), shoal.broadcast(x, 1), shoal.allgather(x)]

    monkeypatch.setenv("SHOAL_PROCESS_GROUP", "ucc")
    for moved, expected in zip(
        *(shoal.Fleet(SIZE, transport=way).run(run) for way in (PROCESS_GROUP, "threads")), strict=True
    ):
        assert all(torch.equal(one, other) for one, other in zip(moved, expected, strict=True))


@requires_backend("mpi")
def test_a_group_of_mpi_moves_tensors() -> None:
    script = """
    import torch, torch.distributed as dist, shoal
    dist.init_process_group("mpi")
    shoal.init(shoal.topology.RingGraph, process_group=dist.group.WORLD)
    x = torch.full((50_000,), float(shoal.rank()))
    print(shoal.neighbor_allreduce(x)[0].item(), shoal.allreduce(x)[0].item())
    shoal.shutdown()
    """
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(SIZE), sys.executable, "-c"]
    environment = plain_environment() | BY_GROUPS | {"SHOAL_TIMEOUT": "20", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*launcher, textwrap.dedent(script)], env=environment, capture_output=True, text=True, timeout=scaled(50)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["1.0 1.0"] * SIZE + [""]


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (3, 1)])
def test_a_group_without_all_ranks_in_order_is_refused(size: int, rank: int) -> None:
    class Given:
        def size(self) -> int:
            return size

        def rank(self) -> int:
            return rank

    with pytest.raises(ValueError, match=f"this is rank {rank} of {size} in that group, and rank 0 of 3 agents"):
        check_backend("gloo", Given(), 3, 0)


@pytest.mark.parametrize("expected_message", ["processgroup", "process_group", "gloo"])
def test_an_unknown_transport_is_refused_with_the_known_ones(
    expected_message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TRANSPORT", expected_message)
    with pytest.raises(
        ValueError, match=f"={expected_message!r}; it may be one of threads, shared_memory, network, process-group"
    ):
        shoal.init()
    with pytest.raises(
        ValueError, match=f"={expected_message!r}; it may be one of threads, shared_memory, network, process-group"
    ):
        shoal.Fleet(2, transport=expected_message)


def begin() -> str:
    try:
        shoal.init()
    except ValueError as error:
        return str(error)
    return "it began"


def test_between_machines_process_groups_are_refused_together_with_tls(tmp_path: Path) -> None:
    certificates.make(tmp_path / "made", 2)
    secured = {"SHOAL_TLS": "on", "SHOAL_CERTIFICATES": str(tmp_path / "made")}
    with (
        network_namespaces(2) as machines,
        World(2, environment=BY_GROUPS | secured, namespaces=machines, init=False) as world,
    ):
        first, second = world.run(begin)
    assert "what a process group of gloo sends to ranks [1] is not encrypted; leave one of the two out" in first.value
    assert second.value != "it began"  # and may learn of it by the end of the first


def test_a_message_without_a_tensor_is_a_protocol_error() -> None:
    def run() -> None:
        message = Message(Kind.DATA, "neighbor_allreduce", "x", where=Where.CARRIED, nbytes=8)
        with pytest.raises(ProtocolError, match="travels over an engine that there is not"):
            current().engine.lifecycle.backend_stages.check(message)

    shoal.Fleet(2).run(run)


def test_a_tensor_larger_than_this_machines_memory_is_a_protocol_error() -> None:
    def run() -> None:
        message = Message(Kind.DATA, "neighbor_allreduce", "x", where=Where.CARRIED, nbytes=1 << 50)
        with pytest.raises(ProtocolError, match="more than this machine has"):
            current().engine.lifecycle.backend_stages.check(message)

    shoal.Fleet(2, transport=PROCESS_GROUP).run(run)


def test_an_exchange_without_a_backend_mark_uses_links() -> None:
    assert Exchange((), ()).carried is None
    assert BackendRequest().among == ()
