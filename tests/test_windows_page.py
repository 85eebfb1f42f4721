"""The page about windows: its code does what it says, its picture is what the code draws, its links lead somewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "windows.md").read_text()
FIRST, PUSH_SUM, MUTEX, STALENESS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
sys.path.append(str(DOCS))

import windows_picture  # noqa: E402


def names_of(code: str, **given: Any) -> dict[str, Any]:
    """Run a block of the page as this agent; the variables that it leaves."""
    result: dict[str, Any] = {"shoal": shoal, "torch": torch, **given}
    exec(code, result)
    return result


def among_three(function: Callable[[], Any]) -> list[Any]:
    """The function's results at three agents that are all neighbours of each other."""

    def run() -> Any:
        shoal.set_topology(shoal.topology.FullyConnectedGraph(3))
        result = function()
        shoal.barrier()
        return result

    return shoal.Fleet(3, timeout=20.0).run(run)


def test_the_first_lines_give_the_documented_result() -> None:
    assert among_three(lambda: names_of(FIRST)["y"].item()) == [3.0, 10.0, 10.0]


def test_push_sum_conserves_mass() -> None:
    def run() -> tuple[float, float]:
        window = names_of(PUSH_SUM)["window"]
        shoal.barrier()
        return window.collect().item(), window.p

    result = among_three(run)
    assert sum(x for x, _ in result) == pytest.approx(3.0, abs=1e-12)
    assert sum(p for _, p in result) == pytest.approx(3.0, abs=1e-12)


def test_the_mutex_lines_read_and_write_at_agent_0() -> None:
    def run() -> list[float]:
        window = shoal.windows.create(torch.tensor([7.0 - shoal.rank()]), "x", zero_init=True)
        if shoal.rank():
            names_of(MUTEX, window=window)
        shoal.barrier()
        return [window.update(0.0, {source: 1.0}, clone=True).item() for source in window.sources]

    assert among_three(run)[0] == [8.0, 8.0]


def test_staleness_reports_received_versions() -> None:
    def run() -> tuple[dict[int, int], dict[int, int], float]:
        window = shoal.windows.create(torch.ones(2), "x")
        if shoal.rank() == 2:
            window.put()
            window.accumulate()
        shoal.barrier()
        names = names_of(STALENESS, window=window)
        return names["version"], names["came"], min(names["ages"].values())

    result = among_three(run)
    assert result[0][:2] == ({1: 0, 2: 1}, {1: 0, 2: 2})
    assert result[2][:2] == ({0: 0, 1: 0}, {0: 0, 1: 0})
    assert all(0 <= age < 20 for *_, age in result)


def test_the_picture_shows_the_values_of_three_agents(tmp_path: Path) -> None:
    made, put, got = windows_picture.states()
    assert [one["x"] for one in got] == [0.0, 1.0, 2.0]
    assert {value for one in made for what, value in one.items() if what != "x"} == {0.0}
    assert (put[1], put[2]) == ({"x": 1.0, "from 0": 10.0, "from 2": 0.0}, {"x": 2.0, "from 0": 10.0, "from 1": 0.0})
    assert got[0] == {"x": 0.0, "from 1": 1.0, "from 2": 2.0}
    windows_picture.draw(tmp_path / "windows.png")
    assert (tmp_path / "windows.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_links_and_pictures_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert len(targets) >= 5
    assert [target for target in targets if not (DOCS / target).exists()] == []


def test_every_call_on_the_page_exists() -> None:
    functions = set(re.findall(r"`(win_\w+|get_win\w+|turn_\w+)", PAGE))
    methods, native = (set(re.findall(rf"`{where}\.(\w+)", PAGE)) for where in ("window", r"shoal\.windows"))
    assert min(len(functions), len(methods)) > 10
    assert [name for name in functions if not hasattr(shoal.bluefog, name)] == []
    assert [name for name in methods if not hasattr(shoal.windows.Window, name)] == []
    assert native == set(shoal.windows.__all__) - {"SlotState", "Window", "turn_off_associated_p"}


def test_every_method_is_on_the_page() -> None:
    public = {name for name in vars(shoal.windows.Window) if not name.startswith("_")}
    output = {name for name in public if f"window.{name}" in PAGE}
    assert public - output == {"name", "tensor", *(name for name in public if name.endswith("_nonblocking"))}
