"""An agent that runs out of receive memory fails itself, and is the agent that all errors name."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest
import torch

import shoal
from shoal.runtime.agent import current
from support.leftovers import nothing_is_left, wait_until
from support.world import World

OVER = [
    pytest.param({}, id="shared_memory", marks=pytest.mark.transport("shared_memory")),
    pytest.param({"SHOAL_TRANSPORT": "network"}, id="network", marks=pytest.mark.transport("network")),
]
SHORT = 1
LITTLE = 1 << 20


def read_what_is_sent(numel: int) -> None:
    """A round in which rank 1 sends nothing, so that it needs memory only to receive; then leave."""
    rank, size = shoal.rank(), shoal.size()
    shoal.barrier()
    if rank == SHORT:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + LITTLE, resource.RLIM_INFINITY))
    try:
        shoal.broadcast(torch.ones(1 if rank == SHORT else numel).expand(numel), root_rank=0)
        shoal.barrier()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        shoal.shutdown()
    raise AssertionError(f"rank {rank} of {size} had memory enough")


@pytest.mark.parametrize("environment", OVER)
def test_an_agent_without_receive_memory_is_named_by_all(environment: dict[str, str]) -> None:
    with World(3, environment=environment) as world:
        for one in world.run(read_what_is_sent, 5_000_000):
            assert one.ranks == (SHORT,), f"rank {one.rank}: {one.error}: {one.trace}"
            assert one.error == ("ShoalError" if one.rank == SHORT else "PeerLost"), one.trace


def send_without_memory(numel: int, failed: Path) -> str:
    """A round in which rank 1 has no memory to send from; then one in which it has.

    The others begin once its call has ``failed``: else it may read what they send first, and have no memory for that.
    """
    rank, x = shoal.rank(), torch.ones(numel)
    out = torch.empty_like(x)
    shoal.barrier()
    if rank == SHORT:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + LITTLE, resource.RLIM_INFINITY))
    else:
        assert wait_until(failed.exists)
    try:
        shoal.neighbor_allreduce(x, out=out)
        error_text = "nothing"
    except (MemoryError, shoal.ShoalError) as error:
        error_text = f"{type(error).__name__} {getattr(error, 'ranks', ())} {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    failed.touch()
    assert bool((shoal.neighbor_allreduce(x, out=out) == 1).all())
    return error_text


@pytest.mark.parametrize("environment", OVER)
def test_an_agent_without_send_memory_raises_and_the_others_get_the_reason(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with World(3, environment=environment) as world:
        errors = world.results(send_without_memory, 5_000_000, tmp_path / "failed")
    assert errors[SHORT].startswith("MemoryError () the system cannot give 20,9"), errors
    for rank in (0, 2):
        assert errors[rank].startswith(f"Mismatch {tuple(sorted((rank, SHORT)))} "), errors
        assert "whose own call failed there (MemoryError: the system cannot give" in errors[rank], errors


def test_if_the_progress_thread_runs_out_of_memory_all_waits_end() -> None:
    def run() -> str:
        engine = current().engine
        poll, me = engine.poller.poll, threading.current_thread()

        def failing_poll(timeout: float) -> object:
            if threading.current_thread() is not me:
                raise MemoryError
            return poll(timeout)

        shoal.barrier()
        if shoal.rank() == 0:
            engine.poller.poll = failing_poll  # type: ignore[method-assign, assignment]
        with pytest.raises(shoal.ShoalError) as caught:  # at once, if the thread has ended the exchange before
            handle = shoal.nonblocking.allreduce(torch.ones(3), name="never" if shoal.rank() else "x")
            assert wait_until(lambda: shoal.rank() == 1 or shoal.bluefog.poll(handle)), "it waits"
            shoal.bluefog.wait(handle)
        engine.poller.poll = poll  # type: ignore[method-assign]
        return str(caught.value)

    with nothing_is_left():
        results = shoal.Fleet(2, timeout=20.0).run(run)
    assert "MemoryError" in results[0], results
