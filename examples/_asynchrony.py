"""What the asynchronous examples share: each agent's own pace, how all learn that they may stop, and a picture."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import torch

import shoal


def interval(shortest: float) -> float:
    """Seconds that a step of this agent takes: of rank 0 the shortest, of the last rank ten times as many."""
    return shortest * 10 ** (shoal.rank() / max(1, shoal.size() - 1))


def until_all_have(steps: int, seconds: float) -> Iterator[int]:
    """Count this agent's steps, one in ``seconds``, until it hears that every agent has made ``steps``.

    Nobody waits for anybody: who is done travels from neighbour to neighbour, through a window.
    """
    done = torch.zeros(shoal.size(), dtype=torch.int32)
    shoal.bluefog.win_create(done, "done", zero_init=True)
    heard = dict.fromkeys(shoal.in_neighbor_ranks(), 1)
    following = time.monotonic()
    for step in count(1):
        yield step
        following = max(following + seconds, time.monotonic())
        time.sleep(max(0.0, following - time.monotonic()))
        if step >= steps:
            done[shoal.rank()] = 1
        shoal.bluefog.win_update("done", 1, heard).clamp_(max=1)
        shoal.bluefog.win_put(done, "done")
        if done.all():  # and the neighbours have been told
            return


def gather(curve: list[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The curves (seconds, value) of all agents, on every agent."""
    lengths = shoal.allgather(torch.tensor([len(curve)])).tolist()
    points = iter(shoal.allgather(torch.tensor(curve, dtype=torch.float64).view(-1, 2)).tolist())
    return [[(seconds, value) for seconds, value in islice(points, length)] for length in lengths]


def draw(path: Path, curves: list[list[tuple[float, float]]], labels: list[str], title: str, value: str) -> None:
    """Write a picture of the curves, one for each agent, over time; values on a logarithmic axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for curve, label in zip(curves, labels, strict=True):
        seconds, values = zip(*curve, strict=True)
        axes.plot(seconds, [one or float("nan") for one in values], label=label, linewidth=1.2)
    axes.set(title=title, xlabel="seconds", ylabel=value, yscale="log")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
