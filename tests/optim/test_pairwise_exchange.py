"""AD-PSGD: averages of two at a time, at any pace, that never move the mean."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import networkx as nx
import pytest
import torch

import shoal
from shoal.compression import QSGD, Cast, Compressor, MinMaxUInt8, Sign, TopK
from shoal.optim.exchanges import pairwise_exchange
from shoal.optim.exchanges.pairwise_exchange import PairwiseExchange
from shoal.windows.window_memory import EDGES
from support.fault_points import over_both
from support.leftovers import wait_until
from support.limits import scaled
from support.optimizers import LR, MODEL, SIZE, batch, flat
from support.survivors import CONTINUE
from support.world import World

Fleets = Callable[..., shoal.Fleet]
STEPS = 200
CLOSE = 1e-6
"""Where agents agree; they begin 1 apart."""


def make(model: torch.nn.Module, lr: float, **options: Any) -> shoal.DecentralizedOptimizer:
    return shoal.optim.DistributedADPSGDOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model, **options)


def start() -> torch.nn.Module:
    model = deepcopy(MODEL)
    torch.nn.utils.vector_to_parameters(flat(model) + shoal.rank(), model.parameters())
    return model


def gossip(compressor: Compressor | None, bucket_bytes: int, steps: int) -> tuple[list[float], float]:
    """The parameters at the end, and how far the mean of all agents has moved.

    Every agent takes another number of steps at another pace. They continue until all agree to ``CLOSE``, and stop
    after 40 times ``steps``: how fast they agree depends on the order in which the machine runs them.
    """
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    model = start()
    before = shoal.allreduce(flat(model))
    optimizer = make(model, 0.0, compression=compressor, bucket_bytes=bucket_bytes)
    for _ in range(40):
        with optimizer.join():
            for _ in range(steps + 2 * shoal.rank()):
                optimizer.step()
                time.sleep(0.0005 * shoal.rank())
        spread = shoal.allreduce((flat(model) - before).abs().max(), op="max")
        if spread < CLOSE:
            break
    moved = (shoal.allreduce(flat(model)) - before).abs().max().item()
    shoal.barrier()
    optimizer.close()
    return flat(model).tolist(), moved


def test_peers_agree_on_their_mean_at_any_pace(fleet: Fleets) -> None:
    check_agreement(fleet(SIZE).run(gossip, None, 60, 10))


@pytest.mark.transport("network")
@pytest.mark.parametrize("compressor", [MinMaxUInt8(), Cast(torch.bfloat16), QSGD(63)], ids=str)
def test_peers_agree_on_their_mean_by_compressed_messages(compressor: Compressor) -> None:
    check_agreement(shoal.Fleet(SIZE, transport="network", timeout=20.0).run(gossip, compressor, 1 << 20, 10))


def check_agreement(agents_results: list[tuple[list[float], float]]) -> None:
    ended = torch.tensor([x for x, _ in agents_results], dtype=torch.float64)
    assert max(moved for _, moved in agents_results) < 1e-12
    assert (ended - (flat(MODEL) + 1.5)).abs().max() < CLOSE


def test_two_peers_average_their_models_and_add_their_local_steps(fleet: Fleets) -> None:
    """x+ = (x_0 + x_1) / 2 - lr g(x), where g is the gradient at the start of the forward pass."""

    def run() -> tuple[list[float], list[float], list[float]]:
        shoal.set_topology(nx.DiGraph([(0, 1), (1, 0)]))
        model = start()
        optimizer = make(model, LR)
        optimizer.step()  # windows are made together; nothing has a gradient yet
        shoal.barrier()
        moved, total = [], torch.zeros_like(flat(model))
        for step in range(4):
            if step % 2 == shoal.rank():  # one after the other
                optimizer.zero_grad()
                x = flat(model)
                model(batch(shoal.rank(), step)).square().mean().backward()
                gradient = torch.cat(
                    [parameter.grad.view(-1) for parameter in model.parameters() if parameter.grad is not None]
                )
                optimizer.step()
                total += LR * gradient
                moved.append((x, flat(model), gradient))
            shoal.barrier()
        optimizer.synchronize()
        shoal.barrier()
        optimizer.close()
        return flat(model).tolist(), total.tolist(), (moved[-1][1] + LR * moved[-1][2]).tolist()

    results = fleet(2).run(run)
    x, steps, averaged = (torch.tensor([one[k] for one in results], dtype=torch.float64) for k in range(3))
    assert (x.mean(0) - (flat(MODEL) + 0.5 - steps.mean(0))).abs().max() < 1e-12
    # The last average is that of agent 1, in the middle; its local step is its own.
    assert (x[0] - averaged[1]).abs().max() < 1e-12
    assert (x[1] - (averaged[1] - (averaged[1] - x[1]))).abs().max() < 1e-12


@pytest.mark.parametrize("staleness", [None, 1])
def test_a_slow_agent_does_not_slow_the_others(fleet: Fleets, staleness: int | None) -> None:
    """The others take 20 steps between two of the slow agent. If one waited for it, none would advance."""
    slow, batches = SIZE - 1, 8
    semaphores = [threading.Semaphore(0) for _ in range(batches)]

    def optimum_distance() -> float:
        shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
        model = torch.nn.Linear(1, 6, bias=False).double()
        shoal.broadcast_parameters(model.state_dict(), 0)
        optimizer = make(model, 0.05, staleness=staleness)
        target = torch.arange(6.0).double().view(6, 1) * (shoal.rank() - 1.5) + 1.0

        def step() -> None:
            optimizer.zero_grad()
            (0.5 * (model.weight - target).square().sum()).backward()
            optimizer.step()

        with optimizer.join():
            for one in semaphores:
                if shoal.rank() == slow:
                    for _ in range(SIZE - 1):
                        assert one.acquire(timeout=15)
                    step()
                else:
                    for _ in range(20):
                        step()
                    one.release()
        spread = (flat(model) - shoal.allreduce(flat(model))).abs().max().item()
        shoal.barrier()
        optimizer.close()
        return spread

    assert max(fleet(SIZE).run(optimum_distance)) < 2.0


@pytest.mark.parametrize(("staleness", "accepted"), [(None, 4), (0, 0), (1, 1), (3, 3)])
def test_the_number_of_averages_accepted_between_two_forward_passes_is_limited(
    staleness: int | None, accepted: int
) -> None:
    """Rank 0 is one step ahead in each of four rounds. Each average that rank 1 accepts sets both to the midpoint."""

    def run() -> list[float]:
        shoal.set_topology(nx.DiGraph([(0, 1), (1, 0)]))
        model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1)).double()
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(torch.zeros(7).double(), model.parameters())
        optimizer = make(model, 0.0, staleness=staleness, bucket_bytes=32)
        for rank in (0, 1):  # whose forward pass was last
            if rank == 0 or shoal.rank() == rank:
                optimizer.step()
                optimizer.synchronize()
            shoal.barrier()
        if shoal.rank() == 0:
            for _ in range(4):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter += 1
                optimizer.step()
                optimizer.synchronize()
        shoal.barrier()
        optimizer.synchronize()
        optimizer.close()
        return flat(model).tolist()

    results = shoal.Fleet(2, transport="threads", timeout=20.0).run(run)
    assert results[1] == [accepted / 2] * 7
    assert results[0] == [4 - accepted / 2] * 7


@pytest.mark.transport("threads")
def test_invalid_combinations_are_refused() -> None:
    def one_way() -> None:
        shoal.set_topology(nx.DiGraph([(0, 1), (1, 2), (2, 0)]))
        make(deepcopy(MODEL), 0.1).step()

    with pytest.raises(ValueError, match=r"the topology has one-way edges: rank \d receives from"):
        shoal.Fleet(3).run(one_way)
    for coarse in (Sign(), TopK(0.01)):
        with pytest.raises(ValueError, match="would send them past each other"):
            PairwiseExchange.of(coarse, None, 0)
    with pytest.raises(TypeError, match="no compressor with a wire format"):
        PairwiseExchange.of(8, None, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="staleness=-1"):
        PairwiseExchange.of(None, -1, 0)


def run_until_lost(victim: int) -> tuple[int, str, float]:
    """Steps taken, the error's name and text, and the seconds to it."""
    import os
    import signal

    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    model = start()
    optimizer = make(model, 0.01)
    shoal.barrier()
    began = time.monotonic()
    for step in range(STEPS):
        if shoal.rank() == victim and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            optimizer.step()
        except shoal.PeerLost as error:
            optimizer.close()
            return step, str(error), time.monotonic() - began
        time.sleep(0.002)
    shoal.barrier()
    optimizer.close()
    return STEPS, "", time.monotonic() - began


@over_both
@pytest.mark.parametrize("on_loss", ["raise", "continue"])
def test_one_agent_is_killed(on_loss: str, environment: dict[str, str]) -> None:
    ways = environment | (CONTINUE if on_loss == "continue" else {})
    with World(SIZE, environment=ways) as world:
        outcomes = world.run(run_until_lost, 1)
    for outcome in outcomes:
        if outcome.rank == 1:
            assert outcome.error == "Died"
        else:
            assert not outcome.error, f"{outcome.error}: {outcome.message}\n{outcome.trace}"
            steps, output, seconds = outcome.value
            assert seconds < scaled(10)
            assert (steps == STEPS and not output) if on_loss == "continue" else "rank 1" in output


def test_a_peer_that_fails_after_it_was_drawn_ends_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_ON_LOSS", "continue")
    put = pairwise_exchange.ops.win_put_nonblocking
    failed: list[bool] = []

    def refused(*given: Any, **named: Any) -> Any:
        if shoal.rank() or failed:
            return put(*given, **named)
        failed.append(True)
        raise shoal.PeerLost("the peer was lost after it was drawn", (1,))

    def run() -> None:
        shoal.set_topology(nx.DiGraph([(0, 1), (1, 0)]))
        model = start()
        optimizer = make(model, LR)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(shoal.rank(), step)).square().mean().backward()
            optimizer.step()
            shoal.barrier()
        optimizer.close()

    monkeypatch.setattr(pairwise_exchange.ops, "win_put_nonblocking", refused)
    shoal.Fleet(2, timeout=20.0).run(run)
    assert failed


@pytest.mark.transport("network")
def test_a_peer_that_was_asked_in_vain_is_asked_no_more() -> None:
    """Its late reply would be taken for the reply to another request, and the mean of all would change."""

    def run() -> list[str]:
        shoal.set_topology(shoal.topology.RingGraph(2))
        model, found = start(), list[str]()
        optimizer = make(model, 0.0, window_prefix="pairs")
        exchange: Any = optimizer._bucket_exchange
        exchange.prepare()
        slot = shoal.windows.named("pairs.0.asks")._part.memory
        if shoal.rank():
            with slot.hold([EDGES], -1, time.monotonic() + 10.0):
                shoal.barrier(timeout=20.0)
                shoal.barrier(timeout=20.0)
            assert wait_until(lambda: slot.state(0).puts == 1)  # it arrives after all
            shoal.barrier(timeout=20.0)
        else:
            shoal.barrier(timeout=20.0)
            with pytest.raises(shoal.DeadlineExceeded, match="win_put"):
                optimizer.step()
            assert exchange._silent == {1}
            shoal.barrier(timeout=20.0)
            shoal.barrier(timeout=20.0)
            optimizer.step()
            found = [str(pairs.asked) for pairs in exchange._pairs.values()]
        shoal.barrier(timeout=20.0)
        optimizer.close()
        return found

    assert shoal.Fleet(2, transport="network", timeout=1.0).run(run) == [["None"], []]


def test_other_agents_get_replies_after_one_could_not_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    put = pairwise_exchange.ops.win_put
    failed: list[bool] = []

    def reply(*given: Any, **named: Any) -> Any:
        if shoal.rank() == 0 and named["dst_weights"] == [1] and not failed:
            failed.append(True)
            raise shoal.DeadlineExceeded("rank 1 is stopped", (1,))
        return put(*given, **named)

    def run() -> list[str]:
        shoal.set_topology(nx.DiGraph([(0, 1), (1, 0), (0, 2), (2, 0)]))
        optimizer, errors = make(start(), 0.0), list[str]()
        exchange: Any = optimizer._bucket_exchange
        exchange.prepare()
        shoal.barrier()
        assert shoal.rank() != 2 or wait_until(lambda: bool(failed))
        for _ in range(20):
            try:
                optimizer.step()
            except shoal.DeadlineExceeded as error:
                errors.append(str(error))
        shoal.barrier(timeout=60.0)
        optimizer.close()
        return errors

    monkeypatch.setattr(pairwise_exchange.ops, "win_put", reply)
    first, second, third = shoal.Fleet(3, timeout=2.0).run(run)
    assert first == ["rank 1 is stopped"] and third == []
    assert len(second) == 1 and "rank 0, with which it averages, has not answered" in second[0]
