"""``SHOAL_CHECK_FINITE``: NaN and infinity are not sent; both sides name their owner, and all agents continue."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal

Fleets = Callable[..., shoal.Fleet]
CULPRIT = 2
OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "static": lambda x: shoal.neighbor_allreduce(x, name="weights"),
    "push": lambda x: shoal.neighbor_allreduce(x, 0.5, None, {(shoal.rank() + 1) % 3: 0.5}, name="weights"),
    "allreduce": lambda x: shoal.allreduce(x, name="weights"),
    "gather": lambda x: shoal.neighbor_allgather(x, name="weights"),
    "hierarchical": lambda x: shoal.bluefog.hierarchical_neighbor_allreduce(x, name="weights"),
    "alone": lambda x: shoal.nonblocking.neighbor_allreduce(x, name="weights").wait(),
}


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CHECK_FINITE", "1")


@pytest.mark.parametrize("numel", [5, 9000], ids=["inline", "region"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_agent_and_the_tensor_are_named_on_all_sides(fleet: Fleets, operation: str, numel: int) -> None:
    def run() -> tuple[str, str]:
        x = torch.ones(numel)
        if shoal.rank() == CULPRIT:
            x[1], x[3] = math.nan, -math.inf
        with pytest.raises(shoal.ShoalError) as caught:
            OPERATIONS[operation](x)
        assert {shoal.rank(), CULPRIT} <= set(caught.value.ranks)  # and through whom it has heard
        after = OPERATIONS[operation](torch.ones(numel))
        assert bool((after == 1).all())
        return type(caught.value).__name__, str(caught.value)

    results = fleet(3).run(run)
    assert [kind for kind, _ in results] == ["Mismatch", "Mismatch", "NotFinite"]
    for _, text in results:
        assert f"2 of the {numel} numbers of its tensor are NaN or infinite" in text and "'weights'" in text
        assert f"rank {CULPRIT}" in text


def test_of_a_fused_message_only_the_non_finite_tensor_fails(fleet: Fleets) -> None:
    def run() -> list[str]:
        handles = []
        for k in range(6):
            x = torch.full((4,), math.nan if (shoal.rank(), k) == (CULPRIT, 3) else float(k))
            handles.append(shoal.nonblocking.neighbor_allreduce(x, name=f"layer{k}"))
        reported = []
        for k, handle in enumerate(handles):
            try:
                assert handle.wait().tolist() == [float(k)] * 4
                reported.append("")
            except shoal.ShoalError as error:
                reported.append(str(error))
        shoal.barrier(name="all have heard")
        return reported

    for error_texts in fleet(3).run(run):
        assert [bool(text) for text in error_texts] == [False, False, False, True, False, False]
        assert "layer3" in error_texts[3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_finite_numbers_of_any_size_pass(fleet: Fleets, dtype: torch.dtype) -> None:
    """Also if their sum is not finite."""
    largest = torch.finfo(dtype).max

    def run() -> bool:
        x = torch.full((100,), largest, dtype=dtype)
        return bool(torch.isfinite(shoal.broadcast(x, 0)).all())

    assert fleet(2).run(run) == [True, True]


def test_integers_and_metrics_are_not_checked(fleet: Fleets) -> None:
    def run() -> float:
        assert shoal.allreduce(torch.tensor([1, 2]), average=False).tolist() == [2, 4]
        return shoal.metrics({"loss": math.nan if shoal.rank() else 1.0})["loss"].values[1]

    assert all(map(math.isnan, fleet(2).run(run)))


@pytest.mark.parametrize("overlap", [None, "backward"])
def test_training_stops_before_the_parameters_become_non_finite(fleet: Fleets, overlap: Any) -> None:
    def run() -> tuple[bool, str]:
        model = torch.nn.Linear(40, 40)
        optimizer = shoal.DecentralizedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model, topology="static", overlap=overlap
        )
        error_texts = ""
        try:
            for step in range(6):
                optimizer.zero_grad()
                factor = math.nan if (shoal.rank(), step) == (1, 3) else 1.0
                (factor * model(torch.ones(2, 40)).square().mean()).backward()
                optimizer.step()
        except shoal.ShoalError as error:
            error_texts = str(error)
        shoal.barrier(name="all have heard")
        spoiled = not all(bool(torch.isfinite(param).all()) for param in model.parameters())
        return spoiled, error_texts

    results = fleet(3).run(run)
    assert [spoiled for spoiled, _ in results] == [False, True, False]
    assert all("NaN or infinite" in error_texts and "rank 1" in error_texts for _, error_texts in results)


@pytest.mark.parametrize("value", ["0", ""])
def test_the_check_is_off_by_default(fleet: Fleets, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SHOAL_CHECK_FINITE", value)
    results = fleet(2).run(lambda: float(shoal.neighbor_allreduce(torch.tensor(math.nan if shoal.rank() else 1.0))))
    assert all(map(math.isnan, results))


def test_an_invalid_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CHECK_FINITE", "yes")
    with pytest.raises(ValueError, match="SHOAL_CHECK_FINITE='yes': it must be 0 or 1"):
        shoal.Fleet(1).run(shoal.rank)


def test_windows_are_not_checked(fleet: Fleets) -> None:
    """An owner that answers another machine must not fail because of the window's values."""

    def run() -> list[bool]:
        x = torch.full((3000,), math.nan if shoal.rank() else 1.0)
        shoal.bluefog.win_create(x, "x", zero_init=True)
        shoal.barrier()
        shoal.bluefog.win_get("x")
        shoal.bluefog.win_put(x, "x")
        shoal.barrier()
        result = shoal.bluefog.win_update("x")
        shoal.bluefog.win_free("x")
        return [bool(torch.isnan(result).all()), float(shoal.allreduce(torch.ones(1))) == 1.0]

    assert fleet(2).run(run) == [[True, True]] * 2
