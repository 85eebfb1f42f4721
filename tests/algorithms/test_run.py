"""The records of a run, its table, and its progress bar."""

from __future__ import annotations

import asyncio
import math
import os
import pty
import re
import sys

import pytest
import torch
from rich.console import Console

import shoal
from shoal.algorithms import Algorithm, ChocoSGD, Gradient, GradientDescent, LocalSteps, Run, run
from shoal.compression import TopK
from shoal.netmodel import Link, Network
from shoal.sim import StackedFleet
from shoal.topology.families.static import ring
from support.leftovers import nothing_is_left

COLUMNS = ["step", "rounds", "exchanges", "bytes", "seconds", "consensus", "distance", "largest"]


def made(steps: int, every: int = 1) -> Run:
    fleet = StackedFleet(ring(4))

    def figures(x: torch.Tensor) -> dict[str, float]:
        return {"distance": float((x - 1).norm()), "largest": float(x.max())}

    network = Network(4, Link(1e-3, 1e6))
    start = torch.zeros(3)
    return fleet.run(GradientDescent(0.5), start, lambda x: x - 1, steps, measure=figures, every=every, network=network)


def lines_of(recorded: Run, **options: int) -> list[list[str]]:
    """The words of the table's lines, without the rule under its head."""
    console = Console(width=100, file=None)
    with console.capture() as captured:
        console.print(recorded.table(**options))
    return [words for line in captured.get().splitlines() if (words := line.split()) and words[0].isascii()]


def test_records_are_plain_numbers_by_name() -> None:
    result = made(6, every=4)
    assert [type(row) for row in result.records] == [dict] * 3
    assert {type(value) for row in result.records for value in row.values()} <= {int, float}
    assert [list(row) for row in result.records] == [COLUMNS] * 3
    assert [row["step"] for row in result.records] == [0, 4, 6]
    assert [row["distance"] for row in result.records] == pytest.approx([12**0.5 * 0.5**step for step in (0, 4, 6)])


def test_a_column_is_a_figure_over_the_records() -> None:
    result = made(6, every=4)
    assert result.column("bytes").tolist() == [0, 4 * 8 * 12, 6 * 8 * 12]
    with pytest.raises(KeyError, match=f"no column 'loss'; there are: {', '.join(COLUMNS)}"):
        result.column("loss")


def test_the_table_shows_every_record() -> None:
    head, *body = lines_of(made(3))
    assert head == COLUMNS
    assert [line[:4] for line in body] == [[str(index)] * 3 + [str(96 * index)] for index in range(4)]
    assert body[1][6] == f"{12**0.5 / 2:.4g}"


def test_a_long_table_keeps_its_first_and_last_row() -> None:
    _, *body = lines_of(made(200), rows=5)
    assert [line[0] for line in body] == ["0", "50", "100", "150", "200"]
    with pytest.raises(ValueError, match="rows=1"):
        made(1).table(rows=1)


def test_the_table_of_a_run_without_records_is_empty() -> None:
    assert lines_of(Run(torch.zeros(1), torch.zeros(1), (), 0)) == []


def test_a_resumed_run_with_another_measure_shows_what_both_have() -> None:
    fleet, start = StackedFleet(ring(4)), torch.zeros(3)
    first = fleet.run(GradientDescent(0.5), start, lambda x: x, 1, measure=lambda x: {"a": 1.0, "b": 2.0})
    both = fleet.run(GradientDescent(0.5), start, lambda x: x, 1, measure=lambda x: {"b": 3.0}, resume=first)
    assert lines_of(both)[0] == ["step", "rounds", "exchanges", "bytes", "consensus", "b"]
    assert both.column("b").tolist() == [2.0, 2.0, 3.0]
    with pytest.raises(KeyError, match="no column 'a'"):
        both.column("a")


def _with_a_bar() -> None:
    StackedFleet(ring(4)).run(GradientDescent(0.5), torch.zeros(3), lambda x: x, 50, progress=True)


def test_the_progress_bar_is_off_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    _with_a_bar()
    assert capfd.readouterr() == ("", "")


def test_the_progress_bar_is_shown_on_a_terminal_and_removed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    ours, remote = pty.openpty()
    with open(remote, "w") as terminal, monkeypatch.context() as patch:  # noqa: PTH123 - of a descriptor
        patch.setattr(sys, "stderr", terminal)
        _with_a_bar()
    output = b""
    # Linux ends a terminal whose other side is closed with an error.
    try:
        while piece := os.read(ours, 4096):
            output += piece
    except OSError:
        pass
    finally:
        os.close(ours)
    assert capfd.readouterr() == ("", "")
    assert b"steps" in output
    assert output.rfind(b"\x1b[2K") > output.rfind(b"steps")  # erased


def _mean() -> float:
    start = torch.full((2,), float(shoal.rank()), dtype=torch.float64)
    result = run(GradientDescent(0.0), start, lambda x: x, ring(shoal.size()), 60, progress=True)
    return float(result.x[0])


def test_many_agents_may_request_a_progress_bar() -> None:
    assert shoal.Fleet(4, timeout=20.0).run(_mean) == pytest.approx([1.5] * 4)


def test_a_fleet_runs_inside_an_event_loop() -> None:
    """As in a notebook, whose cells run inside the main thread's loop."""

    async def cell() -> list[float]:
        ticks = asyncio.create_task(asyncio.sleep(0))
        results = shoal.Fleet(3, timeout=20.0).run(_mean)
        await ticks
        return results

    with nothing_is_left():
        assert asyncio.run(cell()) == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("shape", [(3,), (4, 1), (1, 3), (4, 3, 1), ()])
def test_a_gradient_of_another_shape_is_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    message = re.escape(f"a tensor of shape {list(shape)} for x of shape [4, 3]: they must be equal")
    with pytest.raises(ValueError, match=message):
        StackedFleet(ring(4)).run(GradientDescent(0.1), torch.zeros(4, 3), lambda x: torch.zeros(shape), 1)


def test_a_gradient_that_is_not_a_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"returned a float for x of shape \[4, 3\]: it must return a tensor"):
        StackedFleet(ring(4)).run(GradientDescent(0.1), torch.zeros(4, 3), lambda x: 0.0, 1)


def test_a_gradient_on_all_data_has_the_shape_of_x_too() -> None:
    x = torch.zeros(4, 3)
    gradient = Gradient(lambda x: 2 * x, full=lambda x: x.sum(0))
    assert gradient(x).shape == x.shape
    with pytest.raises(ValueError, match=r"\[3\] for x of shape \[4, 3\]"):
        gradient.full(x)


@pytest.mark.parametrize(
    ("algorithm", "error", "text"),
    [
        (GradientDescent(math.nan), ValueError, r"GradientDescent\(lr=nan\): a finite number of at least 0"),
        (GradientDescent(-1.0), ValueError, r"GradientDescent\(lr=-1\.0\)"),
        (LocalSteps(GradientDescent(math.inf), 2), ValueError, r"GradientDescent\(lr=inf\)"),
        (ChocoSGD(0.1, math.nan, TopK(0.5)), ValueError, r"ChocoSGD\(gamma=nan\)"),
        (ChocoSGD(0.1, 0.5, None), TypeError, r"ChocoSGD\(compressor=None\): a compressor of shoal\.compression"),  # type: ignore[arg-type]
    ],
)
def test_steps_and_compressors_of_an_algorithm_are_checked_before_the_run(
    algorithm: Algorithm, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        StackedFleet(ring(4)).run(algorithm, torch.zeros(3), lambda x: x - 1, 1)
