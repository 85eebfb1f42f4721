"""hvd.join(): agents with different numbers of batches, over all transports."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
import shoal.compat.horovod as hvd
from support.optimizers import LR, MODEL, batch, flat, gradient
from support.world import World

Fleets = Callable[..., shoal.Fleet]
SIZE = 3
ORDERS = [1, 4, 1], [2, 0, 1]
"""How often each agent calls before each of two joins. Rank 1 is the last, then rank 0, with fewer calls in all."""


def test_a_joined_agent_contributes_zeros_and_averages_are_over_all(fleet: Fleets) -> None:
    """In two successive joins, with another agent as the last: by name, without one, and several at once."""

    def run() -> list[Any]:
        hvd.init()
        results: list[Any] = []
        for order in ORDERS:
            own = []
            for _ in range(order[hvd.rank()]):
                handles = [hvd.allreduce_async(torch.full((2,), 3.0)) for _ in range(2)]
                large = hvd.allreduce_async(torch.full((60_000,), 3.0), name="large", op=hvd.Sum)
                first, second = hvd.grouped_allreduce([torch.ones(2), torch.ones(1, dtype=torch.int64)], op=hvd.Sum)
                extremes = [
                    hvd.allreduce(torch.tensor([-2.0, 5.0]), op=op).tolist() for op in (hvd.Min, hvd.Max, hvd.Product)
                ]
                full = hvd.allreduce(torch.tensor([-2]), op=hvd.Min).item()
                rows = hvd.allgather(torch.ones(2, 3)).shape[0], len(hvd.grouped_allgather([torch.ones(1)])[0])
                means = [hvd.synchronize(handle)[1].item() for handle in handles]
                own.append([*means, hvd.synchronize(large)[-1].item(), first[0].item(), second.item(), *rows])
                product = [(-2.0) ** rows[1], 5.0 ** rows[1]]
                assert extremes == [[-2.0, 5.0], [-2.0, 5.0], product]
                assert full == -2
            results.append((own, hvd.join()))
        return [*results, hvd.allreduce(torch.tensor([float(hvd.rank())])).item()]

    def expected(order: list[int], rank: int) -> list[list[float]]:
        present = [sum(count > step for count in order) for step in range(order[rank])]
        return [[n, n, 3.0 * n, n, n, 2 * n, n] for n in present]

    for rank, result in enumerate(fleet(SIZE).run(run)):
        assert result == [(expected(ORDERS[0], rank), 1), (expected(ORDERS[1], rank), 0), 1.0]


def test_training_continues_without_joined_agents() -> None:
    """All end with the model of the agent that joined last."""
    batches = [1, 4, 2]

    def run() -> Tensor:
        hvd.init()
        model = deepcopy(MODEL)
        sgd = torch.optim.SGD(model.parameters(), lr=LR)
        optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), num_groups=2)
        for step in range(batches[hvd.rank()]):
            optimizer.zero_grad()
            model(batch(hvd.rank(), step)).square().mean().backward()
            optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())
        return flat(model)

    x = flat(MODEL)
    for step in range(max(batches)):
        have = [rank for rank in range(SIZE) if step < batches[rank]]
        x = x - LR * torch.stack([gradient(deepcopy(MODEL), x, rank, step) for rank in have]).sum(0) / SIZE
    for result in shoal.Fleet(SIZE, timeout=20.0).run(run):
        assert torch.allclose(result, x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grouped", [False, True])
def test_gradients_of_gathered_tensors_skip_joined_agents(grouped: bool) -> None:
    """No agent waits for a deadline: it is longer than the test's timeout."""

    def run() -> list[float]:
        hvd.init()
        x = torch.ones(2 + hvd.rank(), requires_grad=True)
        if hvd.rank():
            gathered = hvd.grouped_allgather([x])[0] if grouped else hvd.allgather(x)
            (gathered * torch.arange(7.0)).sum().backward()
        hvd.join()
        return [] if x.grad is None else x.grad.tolist()

    # The average of all gradients, of which rank 0 has none: two thirds of rows 0 to 2 and 3 to 6.
    none, *result = shoal.Fleet(SIZE, timeout=3600.0).run(run)
    assert none == []
    for own, rows in zip(result, ([0, 1, 2], [3, 4, 5, 6]), strict=True):
        assert torch.allclose(torch.tensor(own), torch.tensor(rows) * 2 / 3)


def test_calls_of_process_sets_continue_beside_it() -> None:
    def run() -> float:
        pair = hvd.ProcessSet([1, 2])
        hvd.init(process_sets=[pair])
        total = 0.0
        if hvd.rank():
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item()
            total += hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
        hvd.join()
        return total

    assert shoal.Fleet(SIZE, timeout=20.0).run(run) == [0.0, 4.0, 4.0]


def test_a_call_that_a_joined_agent_cannot_take_part_in_ends_the_join() -> None:
    def run() -> None:
        hvd.init()
        if hvd.rank():
            hvd.broadcast(torch.ones(1), 1, name="late")
        hvd.join()

    with pytest.raises(ValueError, match="join on rank 0: others have called broadcast 'late', and an agent that has"):
        shoal.Fleet(2, timeout=20.0).run(run)


def test_a_call_that_waits_for_an_absent_agent_names_it() -> None:
    ended = threading.Event()

    def run() -> None:
        hvd.init()
        if hvd.rank() == 1:
            assert ended.wait(20.0)
            return
        with pytest.raises(
            shoal.DeadlineExceeded, match=r"nothing was received for 0.5 s from ranks \[1\], which have"
        ) as caught:
            hvd.join()
        assert caught.value.ranks == (1,)
        ended.set()

    shoal.Fleet(2, timeout=0.5).run(run)


def test_an_agent_that_leaves_without_joining_ends_the_others_joins() -> None:
    def run() -> None:
        hvd.init()
        if hvd.rank() != 1:
            with pytest.raises(shoal.PeerLost, match=r"rank 1 (has left|is gone: it left)") as caught:
                hvd.join()
            assert caught.value.ranks == (1,)

    shoal.Fleet(3, timeout=10.0).run(run)


def test_without_joined_agents_nothing_is_sent() -> None:
    def run() -> list[str]:
        hvd.init()
        names: list[str] = []
        stop = shoal.observability.events().subscribe(
            lambda event: names.append(event.name) if event.kind == "sent" else None
        )
        hvd.allreduce(torch.ones(3), name="x")
        stop()
        return names

    for names in shoal.Fleet(2, timeout=20.0).run(run):
        assert set(names) == {"x"}


def left_after_a_loss() -> tuple[list[float], int]:
    """Rank 1 dies between two steps; one agent has joined by then, and two continue to train."""
    hvd.init()
    model, rank = torch.nn.Linear(1, 1, bias=False), hvd.rank()
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    seen = []
    for step in range(1 if rank == 0 else 3):
        if (rank, step) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (model(torch.ones(1, 1)) * 12.0).sum().backward()
        optimizer.step()
        seen.append(model.weight.item())
    return seen, hvd.join()


def test_a_failed_agent_is_not_waited_for() -> None:
    world = World(4, environment={"SHOAL_ON_LOSS": "continue"})
    world.excused.add(1)
    try:
        outcomes = world.run(left_after_a_loss)
    finally:
        world.close()
    assert outcomes[1].error == "Died"
    assert [outcomes[rank].value[1] for rank in (0, 2, 3)] == [outcomes[2].value[1]] * 3
    assert outcomes[2].value[1] in (2, 3)
    assert outcomes[0].value[0] == [-12.0]
    for rank in (2, 3):  # means of three; one has zeros
        assert outcomes[rank].value[0] == [-12.0, -20.0, -28.0]


def test_an_agent_waiting_in_join_names_the_missing_ones(
    fleet: Fleets, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHOAL_STALL_SECONDS", "0.4")
    caplog.set_level(logging.WARNING, "shoal")

    def reports() -> list[str]:
        return sorted(record.getMessage() for record in caplog.records if "has waited" in record.getMessage())

    def run() -> None:
        hvd.init()
        limit = time.monotonic() + 10
        while hvd.rank() == 1 and len(reports()) < 2 and time.monotonic() < limit:
            time.sleep(0.01)
        hvd.join()

    fleet(SIZE).run(run)
    output = reports()
    assert [one.split(" has waited ")[0] for one in output] == ["join on rank 0", "join on rank 2"], output
    assert all("for ranks [1]" in one for one in output)
