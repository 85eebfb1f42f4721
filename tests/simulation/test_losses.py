"""Windows and joining agents around a loss: one outcome on all agents, and nothing that stays of an ended process."""

from __future__ import annotations

import pytest
import torch

import shoal
from shoal.ops.state_transfer import admit_joining_agents
from shoal.runtime.agent import bind, current
from support.simulation import threads
from support.simulation.fleet import agents_of
from support.simulation.network import Weather

LIMIT = 120.0


def test_an_accumulate_returns_when_the_surviving_owners_have_it() -> None:
    """Otherwise an owner that collects and frees the window after a barrier would lose the mass."""
    numel, found = 1 << 20, []
    with agents_of(3, weather=Weather(0.2, 0.0, 1 << 16), timeout=60.0) as agents:
        scheduler = agents.world.scheduler

        def program(rank: int) -> None:
            window = shoal.windows.create(torch.full((numel,), float(rank)), "x", zero_init=True)
            shoal.barrier()
            if rank == 2:
                scheduler.sleep(LIMIT * 10)
            if rank == 0:
                scheduler.at(scheduler.now + 0.5, agents.crash, 2)  # while the tensor is sent to both
                window.accumulate(torch.ones(numel))
            shoal.barrier()
            if rank == 1:
                found.append((window.slots()[0].accumulates, window.collect()[0].item()))
                window.free()
            shoal.barrier()

        agents.start(program)
        agents.run(LIMIT)
        assert not agents.failed
    assert found == [(1, 2.0)]


def test_an_agent_that_creates_a_window_after_a_loss_leaves_the_lost_agent_out_as_the_others_do() -> None:
    outcomes: dict[int, str] = {}
    with agents_of(3) as agents:
        scheduler = agents.world.scheduler

        def program(rank: int) -> None:
            shoal.barrier()
            if rank == 2:
                scheduler.sleep(LIMIT * 10)
            if rank == 0:
                scheduler.at(scheduler.now + 1.0, agents.crash, 2)  # it has begun the round that makes the window
            else:
                scheduler.sleep(5.0)
            window = shoal.windows.create(torch.ones(1), "x", zero_init=True)
            for call in (window.put, window.accumulate, window.get):
                call()
            window.update()
            outcomes[rank] = "it works"
            scheduler.sleep(3.0)

        agents.start(program)
        agents.run(LIMIT)
    assert outcomes == {0: "it works", 1: "it works"}


def test_a_survived_loss_is_not_the_cause_of_a_later_free() -> None:
    found: list[str] = []
    with agents_of(3) as agents:
        scheduler = agents.world.scheduler

        def program(rank: int) -> None:
            window = shoal.windows.create(torch.tensor([float(rank)]), "x", zero_init=True)
            shoal.barrier()
            if rank == 2:
                scheduler.sleep(LIMIT * 10)
            if rank == 1:
                scheduler.sleep(10.0)
                with pytest.raises(shoal.Mismatch) as raised:
                    window.put()
                found.append(str(raised.value))
                return
            scheduler.at(scheduler.now + 1.0, agents.crash, 2)
            scheduler.sleep(3.0)

            def get() -> None:
                with pytest.raises(shoal.PeerLost):
                    window.get([2])

            other = threads.Thread(target=bind(get), name="other")
            other.start()
            other.join()
            window.free()
            scheduler.sleep(10.0)

        agents.start(program)
        agents.run(LIMIT)
    assert len(found) == 1 and "rank 0 has freed this window" in found[0]


def test_a_joining_agent_that_has_ended_is_not_admitted() -> None:
    admitted: list[tuple[int, ...]] = []
    with agents_of(3) as agents:
        scheduler = agents.world.scheduler

        def program(rank: int) -> None:
            engine = agents.engines[rank]
            if engine.is_joining:
                scheduler.at(scheduler.now + 1.0, agents.crash, 2)
                engine.rejoin.wait(100.0, 10.0)
            shoal.barrier()
            if rank == 2:
                scheduler.sleep(LIMIT * 10)
            if rank == 0:
                scheduler.at(scheduler.now + 1.0, agents.crash, 2, 1.0)
            scheduler.sleep(40.0)
            admitted.append(admit_joining_agents(current("test")))

        agents.start(program)
        agents.run(LIMIT)
    assert admitted == [(), ()]


def test_of_starts_that_ended_before_their_admission_one_connection_stays() -> None:
    pending: list[int] = []
    with agents_of(3) as agents:
        scheduler = agents.world.scheduler

        def program(rank: int) -> None:
            engine = agents.engines[rank]
            if engine.is_joining:
                if agents.starts[2] < 12:
                    scheduler.at(scheduler.now + 1.0, agents.crash, 2, 1.0)
                engine.rejoin.wait(100.0, 10.0)
            shoal.barrier()
            if rank == 2:
                scheduler.sleep(LIMIT * 10)
            if rank == 0:
                scheduler.at(scheduler.now + 1.0, agents.crash, 2, 1.0)
            for _ in range(8):
                scheduler.sleep(5.0)
                pending.append(len(list(engine.router._pending_peers)))

        agents.start(program)
        agents.run(LIMIT)
        starts = agents.starts[2]
    assert starts == 12 and max(pending) == 1


@pytest.mark.parametrize("call", ["grouped_neighbor_allreduce", "grouped_allreduce"])
@pytest.mark.parametrize("seed", range(3, 7))
def test_a_loss_within_a_group_of_two_dtypes_leaves_each_mean_whole(seed: int, call: str) -> None:
    """The steps begin again where a message was torn. From the first dtype on they would mix the two."""
    numel = 1 << 18
    means: dict[int, list[list[float]]] = {}
    with agents_of(3, seed=seed, weather=Weather(0.2, 0.0, 1 << 16), timeout=60.0) as agents:
        scheduler = agents.world.scheduler

        def program(rank: int) -> None:
            shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
            shoal.barrier()
            if rank == 0:
                scheduler.at(scheduler.now + 0.4 * (seed + 1), agents.crash, 2)
            values = [float(rank), 10.0 * rank]
            tensors = [
                torch.full((numel,), value, dtype=dtype)
                for value, dtype in zip(values, (torch.float32, torch.float64), strict=True)
            ]
            for _ in range(4):
                found = getattr(shoal, call)(tensors, name="group")
                means.setdefault(rank, []).append([mean.unique().item() for mean in found])

        agents.start(program)
        agents.run(LIMIT)
        assert not agents.failed and 2 in agents.crashed
    for rank in (0, 1):
        # Without the lost agent: from the first stage on, or in the round of its loss, where this agent has its weight.
        right = [1.0, 0.5, (rank + 1) / 3]
        for found in means[rank]:
            for mean, scale in zip(found, (1.0, 10.0), strict=True):
                assert min(abs(mean / scale - value) for value in right) < 1e-6, found
        assert len(means[rank]) == 4 and means[rank][-1] == pytest.approx([0.5, 5.0])
