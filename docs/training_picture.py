"""Draws docs/images/overlap.png: what a step of a three-layer model computes and exchanges, and when, in four ways.

    python docs/training_picture.py

The times are those of the timeline (docs/timeline.md) of one agent, in the quickest of thirty steps of each way. Two
agents train on two machines that a wire of 1 Gbit/s joins; these are network namespaces, which need root. A layer is a
bucket of 2.4 MB. (The BlueFog paper's figure 8 sketches what is measured here; the drawing is our own.)
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import torch

import shoal
from shoal.bench.measurement import ADDRESSES, two_machines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = Path(__file__).parent / "images" / "overlap.png"
LAYERS = 3


@dataclass(frozen=True)
class Way:
    """One kind of step."""

    title: str
    wrap: Callable[..., shoal.DecentralizedOptimizer]
    overlap: Literal["backward"] | None = None


WAYS = {
    "gradients": Way("gradient all-reduce", shoal.bluefog.DistributedGradientAllreduceOptimizer, "backward"),
    "atc": Way("adapt, then combine (ATC)", shoal.DecentralizedOptimizer),
    "atc during backward": Way(
        'adapt, then combine (ATC), overlap="backward"', shoal.DecentralizedOptimizer, "backward"
    ),
    "awc": Way(
        "adapt with combine (AWC)",
        partial(shoal.DecentralizedOptimizer, algorithm=shoal.algorithms.GradientDescent(1.0, atc=False)),
    ),
}


# The job


class RecordedSGD(torch.optim.SGD):
    """SGD whose steps are activities of a row of the timeline."""

    row = ""

    def step(self, closure: Any = None) -> Any:
        with shoal.observability.timeline_context(self.row, "local step"):
            return super().step(closure)


class Training:
    """A model of a few layers that trains one way and records what it does, under the name of the way.

    Args:
        name: The way, and the row of the timeline.
        way: What it is.
        model: Of layers that have parameters, each of which is a bucket.
    """

    def __init__(self, name: str, way: Way, model: torch.nn.Sequential) -> None:
        self.model = model
        self._name = name
        for number, layer in enumerate(model, 1):
            _record(layer, f"{name}: layer {number}")
        local = RecordedSGD(model.parameters(), lr=0.01)
        local.row = name
        self.optimizer = way.wrap(local, model, name=name, overlap=way.overlap, bucket_bytes=1)

    def iterate(self, inputs: torch.Tensor) -> None:
        """One step; ``inputs`` are what the first layer takes."""
        with shoal.observability.timeline_context(self._name, "iteration"):
            self.optimizer.zero_grad()
            self.model(inputs).square().mean().backward()
            with shoal.observability.timeline_context(self._name, "step()"):
                self.optimizer.step()


def _record(layer: torch.nn.Module, row: str) -> None:
    """Record the forward and the backward pass of a layer, which ends when all its parameters have their gradients."""
    missing: set[torch.Tensor] = set()

    def end_forward(layer: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        _end(row)
        hook: Any = output.register_hook  # untyped in torch, as the one below
        hook(begin_backward)

    def begin_backward(gradient: torch.Tensor) -> None:
        missing.update(layer.parameters())
        _begin(row, "backward")

    def has_gradient(param: torch.Tensor) -> None:
        missing.discard(param)
        if not missing:
            _end(row)

    layer.register_forward_pre_hook(lambda *_: _begin(row, "forward"))
    layer.register_forward_hook(end_forward)
    for param in layer.parameters():
        hook: Any = param.register_post_accumulate_grad_hook
        hook(has_gradient)


def _begin(row: str, name: str) -> None:
    shoal.observability.timeline_start_activity(row, name)


def _end(row: str) -> None:
    shoal.observability.timeline_end_activity(row)


# Its trace


@dataclass(frozen=True)
class Bar:
    """Something that took time. ``layer`` is 0 where it is no layer's; times are milliseconds."""

    what: str
    layer: int
    start: float
    end: float


def read(trace: Path) -> list[tuple[str, str, float, float]]:
    """The bars of a trace: row, name, start and end in milliseconds."""
    found, rows, open_ = [], {}, defaultdict(list)
    for event in json.loads(trace.read_text()):
        row, at = event["tid"], event.get("ts", 0.0) / 1000
        if event["ph"] == "M" and event["name"] == "thread_name":
            rows[row] = event["args"]["name"]
        elif event["ph"] == "B":
            open_[row].append((event["name"], at))
        elif event["ph"] == "E":
            name, start = open_[row].pop()
            found.append((rows[row], name, start, at))
        elif event["ph"] == "X":
            found.append((rows[row], event["name"], at, at + event["dur"] / 1000))
    return found


def iterations(trace: Path, name: str) -> list[list[Bar]]:
    """What each iteration of a way consists of; 0 is when it begins.

    ``what`` is ``"forward"``, ``"backward"`` or ``"exchange"`` of a layer; ``"local step"`` of the wrapped optimizer,
    ``"step()"``, ``"wait"`` of the thread for an exchange, or ``"iteration"``, which is all.
    """
    rows = read(trace)
    found = []
    for row, what, begin, end in sorted(rows, key=lambda one: one[2]):
        if (row, what) == (f"activities: {name}", "iteration"):
            inside = [one for one in rows if begin <= one[2] and one[3] <= end]
            bars = [bar for one in inside for bar in _bars(name, *one)]
            shifted = [replace(bar, start=bar.start - begin, end=bar.end - begin) for bar in bars]
            found.append(sorted(shifted, key=lambda bar: (bar.start, -bar.end)))
    return found


def _bars(name: str, row: str, what: str, start: float, end: float) -> list[Bar]:
    """What a bar of the trace is to a way: nothing or one bar."""
    kind, _, title = row.partition(": ")
    layer = re.fullmatch(re.escape(name) + r": layer (\d+)", title)
    bucket = re.fullmatch(re.escape(name) + r"(?:\.gradients)?\.(\d+)", title)
    if kind == "waits":
        return [Bar("wait", 0, start, end)]
    if kind == "activities" and title == name:
        return [Bar(what, 0, start, end)]
    if kind == "activities" and layer:
        return [Bar(what, int(layer[1]), start, end)]
    if kind == "exchange" and bucket and what not in ("sum", "prepare"):
        # Buckets are numbered in the order in which their gradients come.
        return [Bar("exchange", LAYERS - int(bucket[1]), start, end)]
    return []


# The picture

WIDTH, BATCH = 768, 640
STEPS = 30
"""Iterations of each way."""
COLOURS = {1: "#2f6f9f", 2: "#d9772f", 3: "#4c9067"}
PALE, INK = "#d5dade", "#1b1f23"
LANE = 0.28
"""An exchange's height; a row is 1 high."""


def train() -> None:
    """An agent's part."""
    torch.set_num_threads(1)
    shoal.init()
    torch.manual_seed(0)
    trainings = [Training(name, way, _model()) for name, way in WAYS.items()]
    inputs = torch.randn(BATCH, WIDTH)
    for _ in range(STEPS):
        for training in trainings:
            shoal.barrier()
            training.iterate(inputs)
    shoal.shutdown()


def _model() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def measure(folder: Path) -> Path:
    """Two agents train on two machines; the trace of rank 0."""
    environ = {**os.environ, "SHOAL_TIMELINE": str(folder), "OMP_NUM_THREADS": "1"}
    with two_machines() as machines:
        agents = [
            subprocess.Popen(
                [
                    *(*enter, sys.executable, "-m", "shoal", "run", "-n", "1", "--nnodes", "2"),
                    *("--node-rank", str(node), "--rendezvous", f"{ADDRESSES[0]}:29400", __file__, "train"),
                ],
                env=environ,
            )
            for node, enter in enumerate(machines)
        ]
        ended = [agent.wait() for agent in agents]
        if any(ended):
            raise SystemExit("the job failed")
    return folder / "shoal-rank0.json"


def quickest(trace: Path, name: str) -> list[Bar]:
    """The shortest iteration of a way: whatever else runs on the machine can only make one longer."""
    return min(iterations(trace, name), key=_end_of)


def _end_of(bars: list[Bar]) -> float:
    return max(bar.end for bar in bars)


def draw(steps: dict[str, list[Bar]], path: Path = PICTURE) -> None:
    """Write the picture of a step of each way, named as in ``WAYS``."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8.4, 1.45 * len(steps) + 0.8), layout="constrained")
    panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(_end_of(bars) for bars in steps.values())
    for axes, (name, bars) in zip(panels, steps.items(), strict=True):
        axes.set_xlim(0, 1.08 * longest)
        _panel(axes, WAYS[name].title, bars)
    panels[-1].set_xlabel("milliseconds since the step began", fontsize=8)
    kinds = {f"layer {layer}": colour for layer, colour in COLOURS.items()} | {"local step": INK, "waits": PALE}
    patches = [Patch(color=colour, label=kind) for kind, colour in kinds.items()]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(kinds), frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _panel(axes: Axes, title: str, bars: list[Bar]) -> None:
    for bar in bars:
        if bar.what == "exchange":
            _bar(axes, bar, 0.3 - LANE * bar.layer, 0.85 * LANE, COLOURS[bar.layer])
        elif bar.what in ("forward", "backward"):
            _bar(axes, bar, 0.7, 0.75, COLOURS[bar.layer], 0.55 if bar.what == "forward" else 1.0)
        elif bar.what in ("wait", "local step"):
            _bar(axes, bar, 0.7, 0.75, PALE if bar.what == "wait" else INK)
    for what in ("forward", "backward"):
        span = [bar for bar in bars if bar.what == what]
        middle = (min(bar.start for bar in span) + _end_of(span)) / 2
        axes.text(middle, 1.1, what, ha="center", va="bottom", fontsize=8, color=INK)
    end = _end_of(bars)
    axes.plot([end, end], [-0.75, 1.1], color=INK, linewidth=1)
    axes.text(end, 1.12, f"{end:.0f} ms", ha="center", va="bottom", fontsize=8, color=INK)
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold", color=INK)
    axes.set_ylim(-0.8, 1.3)
    axes.set_yticks([0.7, 0.3 - 2 * LANE], ["compute", "exchange"], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, color=PALE)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(PALE)


def _bar(axes: Axes, bar: Bar, y: float, height: float, colour: str, alpha: float = 1.0) -> None:
    axes.barh(y, bar.end - bar.start, height, left=bar.start, color=colour, alpha=alpha, linewidth=0)
    if bar.layer and bar.end - bar.start > 0.02 * axes.get_xlim()[1]:
        number: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 7, "color": "white"}
        axes.text((bar.start + bar.end) / 2, y, str(bar.layer), **number)


def main() -> None:
    with TemporaryDirectory() as folder:
        trace = measure(Path(folder))
        draw({name: quickest(trace, name) for name in WAYS})
    print(PICTURE)


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else main()
