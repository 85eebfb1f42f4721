"""Averages that one neighbour cannot spoil: against the equations, and in training with an agent that lies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

import shoal
from shoal.ops.robust_rules import Robust
from support.robust_rules import of_paper
from support.surviving_training import Point3, curvature, target

SIZE = 7


def tensors(dtype: torch.dtype, numel: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    results = [torch.randn(numel, dtype=torch.float64, generator=draw) * (1 + rank) for rank in range(SIZE)]
    return [one.to(dtype) for one in results]


def hops(rule: Robust | None) -> list[int]:
    """To the fewest neighbours that a rule needs, equally many on each side."""
    reach = 1 if rule is None else (rule.neighbours_needed + 1) // 2
    return [*range(-reach, 0), *range(1, reach + 1)]


def average(numel: int, dtype: torch.dtype, rule: Robust | None, spoil: dict[int, float]) -> torch.Tensor:
    """A round over a ring, or a wider one, in which some send a constant instead of their tensor."""
    edges = [(rank, (rank + hop) % SIZE) for rank in range(SIZE) for hop in hops(rule)]
    shoal.set_topology(nx.DiGraph(edges))
    x = tensors(dtype, numel)[shoal.rank()]
    if shoal.rank() in spoil:
        x = torch.full_like(x, spoil[shoal.rank()])
    before = x.clone()
    result = shoal.neighbor_allreduce(x, robust=rule)
    assert torch.equal(x.nan_to_num(), before.nan_to_num())
    out = torch.empty_like(x)
    assert torch.equal(
        shoal.nonblocking.neighbor_allreduce(x, robust=rule, out=out).wait().nan_to_num(), result.nan_to_num()
    )
    return result


RULES = [
    shoal.robust.FiniteOnly(),
    shoal.robust.ClippedGossip(radius=2.5),
    shoal.robust.ClippedGossip(),
    shoal.robust.ClippedGossip(tolerated=2),
    shoal.robust.TrimmedMean(),
    shoal.robust.CoordinateMedian(),
    shoal.robust.ClippedSum(),
    shoal.robust.ClippedSum(tolerated=2),
    shoal.robust.NearestNeighbours(),
    shoal.robust.NearestNeighbours(tolerated=2),
]


@pytest.mark.parametrize("spoil", [{}, {2: 1e6}, {2: float("nan")}, {1: float("inf"), 3: -1e9}], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    "transport",
    [pytest.param(name, marks=pytest.mark.transport(name)) for name in ("threads", "shared_memory", "network")],
)
def test_each_rule_is_its_equation(rule: Robust, spoil: dict[int, float], transport: str) -> None:
    for numel, dtype, tolerance in ((7, torch.float64, 1e-13), (100_000, torch.float32, 1e-5)):
        fleet = shoal.Fleet(SIZE, transport=transport)
        results = fleet.run(average, numel, dtype, rule, spoil)
        x = [tensor.double().numpy() for tensor in tensors(dtype, numel)]
        for rank, value in spoil.items():
            x[rank] = np.full(numel, value)
        for rank in range(SIZE):
            if rank in spoil and not np.isfinite(spoil[rank]):
                continue
            group = sorted({(rank + hop) % SIZE for hop in hops(rule)})
            expected = of_paper(rule, x[rank], [x[one] for one in group], [1 / (len(group) + 1)] * len(group))
            scale = np.abs(expected).max()
            np.testing.assert_allclose(results[rank].double().numpy(), expected, rtol=0, atol=tolerance * (1 + scale))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_trimmed_mean_of_16_bits_is_rounded_once(dtype: torch.dtype) -> None:
    """Its sum may be above what 16 bits hold, or need more digits than they have."""
    columns = [
        [40000.0, 40000.0, 40000.0, 0.0, 60000.0],
        [1.0, 1.0, 1.0078125, 0.0, 9.0],
        [3.0, 5.0, 256.0, 1.0, 999.0],
    ]
    own, *others = torch.tensor(columns, dtype=torch.float64).T.contiguous().to(dtype)
    out = torch.empty_like(own)
    shoal.robust.TrimmedMean().combine(0, out, own, 0.2, [(rank, one, 0.2) for rank, one in enumerate(others, 1)])
    expected = torch.stack([own, *others]).double().sort(dim=0).values[1:-1].mean(0).to(dtype)
    assert torch.equal(out, expected)


def test_without_outliers_the_result_is_the_plain_average_bit_for_bit() -> None:
    plain = shoal.Fleet(SIZE).run(average, 1000, torch.float32, None, {})
    for rule in (shoal.robust.FiniteOnly(), shoal.robust.ClippedGossip(radius=1e9)):
        assert all(
            torch.equal(one, other)
            for one, other in zip(shoal.Fleet(SIZE).run(average, 1000, torch.float32, rule, {}), plain, strict=True)
        )


def test_a_sender_of_non_finite_values_is_named(caplog: pytest.LogCaptureFixture) -> None:
    from shoal.ops import robust_rules

    robust_rules._named.clear()
    with caplog.at_level(logging.WARNING, "shoal"):
        shoal.Fleet(SIZE).run(average, 3, torch.float32, shoal.robust.FiniteOnly(), {2: float("nan")})
    logged = sorted(record.message for record in caplog.records)
    assert logged == [f"rank {rank} leaves out the values of rank 2: they are not finite" for rank in (1, 3)]


def too_few(call: Callable[[], torch.Tensor]) -> str:
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    try:
        call()
    except ValueError as error:
        shoal.barrier()  # leave no agent behind that has not called it yet
        return str(error)
    shoal.barrier()
    return ""


def one_source(form: str, rule: Robust) -> torch.Tensor:
    """Each agent receives from one other."""
    rank, size = shoal.rank(), shoal.size()
    sources = None if form == "push" else {(rank - 1) % size: 0.5}
    destinations = None if form == "pull" else {(rank + 1) % size: 0.5}
    return shoal.neighbor_allreduce(torch.ones(2), 0.5, sources, destinations, robust=rule)


@pytest.mark.parametrize("rule", [shoal.robust.ClippedGossip(), shoal.robust.TrimmedMean()], ids=str)
@pytest.mark.parametrize("form", ["static", "push", "pull", "push-pull"])
def test_too_few_neighbours_in_a_round_are_refused_with_the_remedy(rule: Robust, form: str) -> None:
    static = partial(shoal.neighbor_allreduce, torch.ones(2), robust=rule)
    results = shoal.Fleet(4).run(too_few, static if form == "static" else partial(one_source, form, rule))
    for rank, output in enumerate(results):
        assert f"robust={rule}: an agent needs at least 3 neighbours" in output
        assert f"rank {rank} has ranks [" in output
        assert "FullyConnectedGraph" in output


def in_a_group(rule: Robust) -> torch.Tensor:
    """Agents 0 to 3 of 6, of which each has the three others as neighbours, and 4 and 5 with one."""
    shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
    group = [0, 1, 2, 3] if shoal.rank() < 4 else [4, 5]
    return shoal.neighbor_allreduce(torch.tensor([float(shoal.rank())]), robust=rule, group=group)


def test_only_the_neighbours_in_a_group_count() -> None:
    results = shoal.Fleet(6).run(too_few, partial(in_a_group, shoal.robust.TrimmedMean()))
    assert results[:4] == [""] * 4
    assert all("needs at least 3 neighbours" in output for output in results[4:])


def without_a_need() -> list[float]:
    shoal.set_topology(shoal.topology.RingGraph(shoal.size()))
    x = torch.tensor([float(shoal.rank())])
    rules = (shoal.robust.FiniteOnly(), shoal.robust.ClippedGossip(radius=9.0))
    results = [shoal.neighbor_allreduce(x, robust=rule).item() for rule in rules]
    alone = [
        shoal.neighbor_allreduce(x, 1.0, {}, {}, robust=rule).item() for rule in (shoal.robust.TrimmedMean(), *rules)
    ]
    return results + alone


def test_a_rule_without_a_minimum_and_an_agent_without_neighbours_are_no_error() -> None:
    for rank, result in enumerate(shoal.Fleet(4).run(without_a_need)):
        assert result[0] == result[1] != rank or rank in (1, 2)
        assert result[2:] == [rank] * 3


def with_schedule(schedule: shoal.topology.Schedule, rule: Robust) -> str:
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        shoal.DecentralizedOptimizer(sgd, model, topology=schedule, robust=rule)
    except ValueError as error:
        return str(error)
    return ""


def test_an_optimizer_checks_the_rounds_of_its_schedule() -> None:
    gossip = shoal.topology.find("gossip-pga").schedule(4)
    for output in shoal.Fleet(4).run(with_schedule, gossip, shoal.robust.TrimmedMean()):
        assert "needs at least 3 neighbours" in output
        assert "in round 0 of topology= rank 0 has 1" in output
    full = shoal.topology.find("fully-connected").schedule(4)
    assert shoal.Fleet(4).run(with_schedule, full, shoal.robust.TrimmedMean()) == [""] * 4
    assert shoal.Fleet(4).run(with_schedule, gossip, shoal.robust.FiniteOnly()) == [""] * 4


def by_hand() -> str:
    model = torch.nn.Linear(1, 1)
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.robust, rank, size = shoal.robust.ClippedGossip(), shoal.rank(), shoal.size()
    optimizer.self_weight, optimizer.src_weights = 0.5, {(rank - 1) % size: 0.5}
    optimizer.dst_weights = [(rank + 1) % size]
    model(torch.ones(1, 1)).sum().backward()
    try:
        optimizer.step()
    except ValueError as error:
        shoal.barrier()
        return str(error)
    return ""


def test_an_optimizer_checks_explicit_weights_in_the_step() -> None:
    assert all("needs at least 3 neighbours" in output for output in shoal.Fleet(4).run(by_hand))


def after_a_loss(rule: Robust) -> list[float]:
    shoal.set_topology(shoal.topology.FullyConnectedGraph(shoal.size()))
    x, result = torch.tensor([float(shoal.rank())]), []
    for round_ in range(3):
        if round_ == 1 and shoal.rank() == 3:
            shoal.shutdown()
            return result
        x = shoal.neighbor_allreduce(x, robust=rule)
        result.append(x.item())
    return result


@pytest.mark.parametrize("rule", [shoal.robust.ClippedGossip(), shoal.robust.TrimmedMean()], ids=str)
def test_survivors_with_too_few_neighbours_warn_once_and_continue(
    rule: Robust, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.ops import robust_rules

    robust_rules._warned.clear()
    monkeypatch.setenv("SHOAL_ON_LOSS", "continue")
    with caplog.at_level(logging.WARNING, "shoal"):
        results = shoal.Fleet(4).run(after_a_loss, rule)
    assert [len(one) for one in results] == [3, 3, 3, 1]
    logged = sorted(record.message for record in caplog.records if "needs at least" in record.message)
    assert [one.split("and rank ")[1][0] for one in logged] == ["0", "1", "2"], logged
    assert all(one.endswith("Agents were lost, so it goes on without that guarantee") for one in logged)


def train(rule: Robust | None, liar: str) -> list[float]:
    """Rank 4 is dishonest, if it is; the others minimise what they have."""
    rank, model = shoal.rank(), Point3()
    optimizer = shoal.DecentralizedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02), model, topology=shoal.topology.FullyConnectedGraph(5), robust=rule
    )
    c, h = torch.tensor(target(min(rank, 3)) * 0.1), curvature(0)
    draw = torch.Generator().manual_seed(1)
    for _ in range(600):
        optimizer.zero_grad()
        (0.5 * h * (model.x - c).square().sum()).backward()
        if rank == 4 and liar:
            with torch.no_grad():
                lies = {"constant": torch.full((3,), 1e3), "noise": 100 * torch.randn(3, generator=draw)}
                lies["nan"] = torch.full((3,), float("nan"))
                model.x.copy_(lies[liar])
            for group in optimizer.param_groups:
                group["lr"] = 0.0
        optimizer.step()
    return model.x.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "liar"),
    [
        (shoal.robust.ClippedGossip(), "constant"),
        (shoal.robust.TrimmedMean(), "nan"),
        *(
            pytest.param(rule, liar, marks=pytest.mark.soak)
            for rule, liar in (
                (shoal.robust.ClippedGossip(), "noise"),
                (shoal.robust.ClippedGossip(), "nan"),
                (shoal.robust.TrimmedMean(), "constant"),
                (shoal.robust.TrimmedMean(), "noise"),
            )
        ),
    ],
    ids=str,
)
def test_honest_agents_learn_beside_a_byzantine_one(rule: Robust, liar: str) -> None:
    honest = np.mean([target(rank) * 0.1 for rank in range(4)], axis=0)
    results = np.array(shoal.Fleet(5).run(train, rule, liar)[:4])
    assert np.abs(results - honest).max() < 0.25, results
    spoiled = np.array(shoal.Fleet(5).run(train, None, liar)[:4])
    assert not np.abs(spoiled - honest).max() < 5.0


def wrong(arguments: Any) -> None:
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments(sgd, model)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: shoal.robust.ClippedGossip(radius=-1.0), ValueError, "radius=-1.0 must be 0 or more"),
        (lambda: shoal.robust.ClippedGossip(radius=float("nan")), ValueError, "radius=nan must be 0 or more"),
        (lambda: shoal.robust.ClippedGossip(tolerated=0), ValueError, "tolerated=0 must be 1 or more"),
        (lambda: shoal.robust.TrimmedMean(0), ValueError, "count=0 must be 1 or more"),
        (lambda: shoal.robust.ClippedSum(0), ValueError, "tolerated=0 must be 1 or more"),
        (lambda: shoal.robust.NearestNeighbours(0), ValueError, "tolerated=0 must be 1 or more"),
        (lambda: shoal.robust.ClippedGossip("a"), TypeError, "radius='a' must be a number"),
        (
            lambda: shoal.robust.ClippedGossip(tolerated=1.5),
            TypeError,
            "ClippedGossip: tolerated must be an int, got 1",
        ),
        (lambda: shoal.robust.TrimmedMean(1.5), TypeError, "TrimmedMean: count must be an int, got 1.5"),
        (lambda: shoal.robust.ClippedSum(True), TypeError, "ClippedSum: tolerated must be an int, got True"),
        (lambda: shoal.robust.NearestNeighbours(1.5), TypeError, "tolerated must be an int, got 1.5"),
    ],
)
def test_invalid_rules_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def refused() -> list[str]:
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    calls: list[Any] = [
        lambda: shoal.DecentralizedOptimizer(sgd, model, robust="median"),
        lambda: shoal.bluefog.DistributedGradientAllreduceOptimizer(sgd, model, robust=shoal.robust.TrimmedMean()),
        lambda: shoal.DecentralizedOptimizer(
            sgd, model, shoal.algorithms.GradientTracking(1.0), robust=shoal.robust.TrimmedMean()
        ),
        lambda: shoal.neighbor_allreduce(torch.ones(2, dtype=torch.complex64), robust=shoal.robust.TrimmedMean()),
    ]
    for call in calls:
        try:
            call()
        except (TypeError, ValueError) as error:
            results.append(str(error))
    return results


def test_a_rule_without_effect_is_refused() -> None:
    for output in shoal.Fleet(8).run(refused):
        assert [one.split(":")[0][:20] for one in output] and len(output) == 4, output
        assert "must be a rule" in output[0] and "would not count" in output[1] and "would not count" in output[2]
        assert "no order" in output[3]
