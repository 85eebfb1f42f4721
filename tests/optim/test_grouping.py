"""``num_groups=`` and ``groups=``: which parameters travel together. Groups change messages, and no bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.optim.exchanges.buckets import as_given, by_count
from support.optimizers import MODEL, SIZE, batch, flat

Fleets = Callable[..., shoal.Fleet]
ATC, GRADIENTS = shoal.DecentralizedOptimizer, shoal.bluefog.DistributedGradientAllreduceOptimizer
Options = dict[str, Any]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def names() -> list[str]:
    return [name for name, _ in MODEL.named_parameters()]


def train(make: Any, options: Options) -> tuple[torch.Tensor, list[list[str]]]:
    """The model after three steps, and what travelled in each message of a step, as its size says."""
    shoal.set_topology(shoal.topology.RingGraph(SIZE))
    model = deepcopy(MODEL)
    optimizer = make(sgd(model), model, **options)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(shoal.rank(), step)).square().mean().backward()
        optimizer.step()
    layout = optimizer._bucket_exchange.layout
    optimizer.close()
    return flat(model), layout


@pytest.mark.parametrize("make", [ATC, GRADIENTS], ids=["atc", "gradients"])
@pytest.mark.parametrize("overlap", [None, "backward"])
def test_grouping_changes_no_bits(fleet: Fleets, make: Any, overlap: str | None) -> None:
    def run() -> list[tuple[torch.Tensor, list[list[str]]]]:
        first, *rest = names()
        each: list[Options] = [{}, {"num_groups": 1}, {"num_groups": 3}, {"groups": [[first, rest[-1]], rest[:1]]}]
        return [train(make, options | {"overlap": overlap}) for options in each]

    for result in fleet(SIZE).run(run):
        assert all(torch.equal(model, result[0][0]) for model, _ in result)
        assert [len(layout) for _, layout in result[1:3]] == [1, 3]
        first, *rest = names()
        assert result[3][1][:2] == [[first, rest[-1]], rest[:1]]
        assert sorted(name for group in result[3][1] for name in group) == sorted(names())


def test_a_group_is_one_message_to_each_neighbour(fleet: Fleets) -> None:
    def run(count: int) -> int:
        shoal.set_topology(shoal.topology.RingGraph(SIZE))
        model, sent = deepcopy(MODEL), []
        optimizer = ATC(sgd(model), model, num_groups=count)
        model(batch(shoal.rank(), 0)).square().mean().backward()
        optimizer.step()
        stop = shoal.observability.events().subscribe(
            lambda event: sent.append(event.name) if event.kind == "sent" else None
        )
        optimizer.step()
        stop()
        optimizer.close()
        return len([name for name in sent if not name.startswith("~")])

    agents = fleet(SIZE)
    assert [agents.run(run, count) for count in (1, 2, 4)] == [[2] * SIZE, [4] * SIZE, [8] * SIZE]


def params_of(sizes: Sequence[int], dtypes: Sequence[torch.dtype] | None = None) -> dict[nn.Parameter, str]:
    kinds = dtypes or [torch.float32] * len(sizes)
    return {
        nn.Parameter(torch.zeros(size, dtype=dtype)): str(number)
        for number, (size, dtype) in enumerate(zip(sizes, kinds, strict=True))
    }


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([1, 1, 1, 1], 2, [["3", "2"], ["1", "0"]]),
        ([1, 1, 1, 1], 4, [["3"], ["2"], ["1"], ["0"]]),
        ([100, 1, 1, 1], 2, [["3", "2", "1"], ["0"]]),
        ([1, 1, 1, 100], 2, [["3"], ["2", "1", "0"]]),
        ([1, 100, 1], 3, [["2"], ["1"], ["0"]]),
        ([5, 5, 5, 5, 5, 5], 1, [["5", "4", "3", "2", "1", "0"]]),
    ],
)
def test_groups_by_count_have_that_number_and_about_equal_sizes(
    sizes: list[int], count: int, expected: list[list[str]]
) -> None:
    assert by_count(params_of(sizes), count) == expected


def test_a_group_of_two_dtypes_is_two_messages() -> None:
    params = params_of([2, 2, 2], [torch.float32, torch.float64, torch.float32])
    assert as_given(params, [["0", "1", "2"]]) == [["0", "2"], ["1"]]


def test_parameters_are_passed_directly_or_by_name() -> None:
    params = params_of([2, 2, 2])
    _, one, two = params
    assert as_given(params, [[two, "0"], (one,)]) == [["2", "0"], ["1"]]


def test_invalid_groupings_are_refused() -> None:
    def make(**options: Any) -> None:
        model = deepcopy(MODEL)
        ATC(sgd(model), model, topology=shoal.topology.RingGraph(2), **options)

    def run() -> None:
        for options, error, message in [
            ({"num_groups": 0}, ValueError, "num_groups=0: it must be a whole number, 1 to"),
            ({"num_groups": 99}, ValueError, "num_groups=99"),
            ({"num_groups": 2, "bucket_bytes": 10}, ValueError, "leave groups and bucket_bytes out"),
            ({"num_groups": 2, "groups": []}, ValueError, "leave groups and bucket_bytes out"),
            ({"groups": "0.weight"}, TypeError, "groups must be lists"),
            ({"groups": [["nobody"]]}, ValueError, "'nobody' is no parameter of this optimizer"),
            ({"groups": [[torch.ones(2)]]}, ValueError, "a Tensor is no parameter of this optimizer"),
            ({"groups": [names()[:1], names()[:1]]}, ValueError, "is named twice"),
        ]:
            with pytest.raises(error, match=message):
                make(**options)
        model = deepcopy(MODEL)
        with pytest.raises(ValueError, match="GradientTracking steps one vector of all parameters"):
            shoal.DecentralizedOptimizer(sgd(model), model, shoal.algorithms.GradientTracking(1.0), num_groups=2)

    shoal.Fleet(2).run(run)
