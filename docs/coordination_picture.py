"""Draws docs/images/coordination.png: six averages in an order of each agent's own, by edges and in one order.

    python docs/coordination_picture.py

What is drawn is what three agents of a fleet did, in a step after the first: when each call was submitted, and when its
tensors had come. Above they travel by Shoal's own transport, below by a process group of Gloo.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

import shoal
from shoal.execution.events import Event

PICTURE = Path(__file__).parent / "images" / "coordination.png"
AGENTS, NAMES = 3, "ABCDEF"
PAUSE = 4e-3
"""Seconds between an agent's calls: what it computes meanwhile."""
SHOWN_STEP = 12
Seen = dict[str, dict[str, float]]


def step(number: int) -> Seen:
    """One agent's step: its calls, in an order of its own, and when what happened to them, in milliseconds."""
    seen: Seen = {"submitted": {}, "finished": {}, "moved": {}}

    def note(event: Event) -> None:
        if event.kind in seen and event.name in NAMES:
            seen[event.kind][event.name] = event.end / 1e6

    shoal.barrier()
    stop = shoal.observability.events().subscribe(note)
    order = random.Random(number * AGENTS + shoal.rank()).sample(NAMES, len(NAMES))
    handles = []
    for name in order:
        handles.append(shoal.nonblocking.allreduce(torch.ones(1 << 16), name=name))
        time.sleep(PAUSE)
    for handle in handles:
        handle.wait()
    stop()
    shoal.barrier()
    return seen


def run() -> list[Seen]:
    return [step(number) for number in range(SHOWN_STEP + 1)]


def draw(axes: Axes, found: list[Seen], done: str, title: str) -> None:
    begin = min(min(seen["submitted"].values()) for seen in found)
    for rank, seen in enumerate(found):
        y = AGENTS - 1 - rank
        axes.axhline(y + 0.2, color="0.85", zorder=0)
        axes.axhline(y - 0.2, color="0.85", zorder=0)
        for name in NAMES:
            color = f"C{NAMES.index(name)}"
            called, came = seen["submitted"][name] - begin, seen[done][name] - begin
            axes.plot([called, came], [y + 0.2, y - 0.2], color=color, linewidth=1.2)
            for x, at in ((called, y + 0.2), (came, y - 0.2)):
                axes.text(x, at, name, color="white", fontsize=7, ha="center", va="center", weight="bold",
                          bbox={"boxstyle": "circle,pad=0.15", "color": color})  # fmt: skip
    axes.set_yticks(range(AGENTS), [f"agent {AGENTS - 1 - y}" for y in range(AGENTS)])
    axes.set_ylim(-0.5, AGENTS - 0.5)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("milliseconds; upper row: called, lower row: there", fontsize=8)
    axes.tick_params(labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def main() -> None:
    _, (above, below) = plt.subplots(2, 1, figsize=(8, 5.4), layout="constrained")
    by_edges = [seen[SHOWN_STEP] for seen in shoal.Fleet(AGENTS).run(run)]
    draw(
        above, by_edges, "finished", "Shoal's own transport: matched on each edge, by name; each call ends when it can"
    )
    in_order = [seen[SHOWN_STEP] for seen in shoal.Fleet(AGENTS, transport="process-group").run(run)]
    draw(below, in_order, "moved", "A process group: called in any order, moved in one order, the same on all agents")
    plt.savefig(PICTURE, dpi=130)


if __name__ == "__main__":
    main()
