"""The BlueFog paper's figure 8, asserted from the events of a trace: which exchange runs during which layer.

The result does not depend on speed: layers wait, in the middle of their passes, for the required event (the end of
an exchange, the progress of another agent). An event that never happens causes a timeout, which the trace shows.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.execution.events import Event
from shoal.runtime.agent import current

sys.path.append(str(Path(__file__).parents[2] / "docs"))

from training_picture import LAYERS, PICTURE, WAYS, Bar, Training, Way, draw, iterations, quickest

Fleets = Callable[..., shoal.Fleet]

PATIENCE = 8.0
NUMEL = 5000
GRADIENTS = Way("", shoal.bluefog.DistributedGradientAllreduceOptimizer)


class Pace:
    """An agent's actions in the middle of a pass, and the times when its exchanges have ended."""

    def __init__(self) -> None:
        self.inside: dict[tuple[str, int], Callable[[], object]] = {}
        self._ended: dict[str, threading.Event] = {}

    def __call__(self, phase: str, layer: int) -> None:
        self.inside.get((phase, layer), bool)()

    def on_event(self, event: Event) -> None:
        if event.kind == "finished":
            self._of(event.name).set()

    def until_ended(self, *exchanges: str) -> Callable[[], object]:
        """Waits until exchanges of these names have ended after now."""
        events = [self._of(name) for name in exchanges]
        for event in events:
            event.clear()
        return lambda: [event.wait(PATIENCE) for event in events]

    def _of(self, name: str) -> threading.Event:
        return self._ended.setdefault(name, threading.Event())


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pace: Callable[[str], None]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.pace = pace
        pace("forward")
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        ctx.pace("backward")
        return gradients[0] * weight, gradients[0] * x, None


class Paced(nn.Module):
    """Multiplies by its parameter, and in the middle of each pass does what the pace says."""

    def __init__(self, number: int, pace: Pace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NUMEL))
        self._pace = lambda phase: pace(phase, number)

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Multiply.apply  # untyped in torch
        y: Tensor = apply(x, self.weight, self._pace)
        return y


class Step:
    """One iteration of one agent, from its trace."""

    def __init__(self, bars: list[Bar]) -> None:
        def of_layers(what: str) -> dict[int, Bar]:
            result = {bar.layer: bar for bar in bars if bar.what == what}
            assert sorted(result) == list(range(1, LAYERS + 1)), f"{what} of layers {sorted(result)}"
            assert len(result) == sum(bar.what == what for bar in bars)
            return result

        self.forward, self.backward, self.exchange = map(of_layers, ("forward", "backward", "exchange"))
        self.local = [bar for bar in bars if bar.what == "local step"]
        [self.step] = [bar for bar in bars if bar.what == "step()"]
        assert self.forward[1].end < self.forward[2].end < self.forward[3].end < self.backward[3].start
        assert self.backward[3].end < self.backward[2].start < self.backward[2].end < self.backward[1].start
        assert self.backward[1].end < self.step.start


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_TIMELINE", str(tmp_path))
    return tmp_path


def train(agents: shoal.Fleet, folder: Path, name: str, way: Way, begin: Callable[[Pace], object]) -> list[Step]:
    """The second step of each agent; ``begin`` is called by each before it, and sets the pace of the agent."""

    def run() -> None:
        pace = Pace()
        unsubscribe = current("test").engine.events.subscribe(pace.on_event)
        training = Training(name, way, nn.Sequential(*(Paced(number, pace) for number in range(1, LAYERS + 1))))
        training.iterate(torch.ones(NUMEL))
        shoal.barrier()
        begin(pace)
        training.iterate(torch.ones(NUMEL))
        unsubscribe()

    agents.run(run)
    return [Step(iterations(folder / f"shoal-rank{rank}.json", name)[1]) for rank in range(agents.size)]


def both_ways_during_backward() -> list[tuple[str, Way, str]]:
    return [
        ("gradients", WAYS["gradients"], "gradients.gradients."),
        ("atc during backward", WAYS["atc during backward"], "atc during backward."),
    ]


def test_awc_exchanges_from_the_first_forward_pass_on_and_steps_last(fleet: Fleets, traces: Path) -> None:
    computing = threading.Event()

    def begin(pace: Pace) -> None:
        if shoal.rank() == 1:
            computing.wait(PATIENCE)
            return
        pace.inside["forward", 1] = computing.set
        pace.inside["backward", LAYERS] = pace.until_ended("awc.0", "awc.1", "awc.2")

    own, other = train(fleet(2), traces, "awc", WAYS["awc"], begin)
    for step in (own, other):
        for layer, exchange in step.exchange.items():
            assert exchange.start < step.forward[1].start
            assert exchange.start < step.backward[layer].start
    for exchange in own.exchange.values():  # the other agent was not there before our forward pass
        assert own.forward[1].start < exchange.end < own.backward[LAYERS].end
    [local] = own.local
    assert own.step.start < local.start < local.end < own.step.end


@pytest.mark.parametrize(("name", "way", "prefix"), both_ways_during_backward(), ids=["gradients", "atc"])
def test_a_layer_is_exchanged_during_the_backward_pass_of_the_preceding_layer(
    fleet: Fleets, traces: Path, name: str, way: Way, prefix: str
) -> None:
    second = threading.Event()

    def begin(pace: Pace) -> None:
        if shoal.rank() == 1:
            pace.inside["backward", 3] = lambda: second.wait(PATIENCE)
            return
        third_ended = pace.until_ended(f"{prefix}0")

        def in_the_second() -> None:
            second.set()
            third_ended()

        pace.inside["backward", 2] = in_the_second
        pace.inside["backward", 1] = pace.until_ended(f"{prefix}1")

    own, other = train(fleet(2), traces, name, way, begin)
    for step in (own, other):
        assert step.backward[3].end < step.exchange[3].start < step.backward[2].start
        assert step.backward[2].end < step.exchange[2].start < step.backward[1].start
        assert step.backward[1].end < step.exchange[1].start < step.step.start
    # The other agent's third layer ended during our second one's backward pass.
    assert own.backward[2].start < own.exchange[3].end < own.backward[2].end
    assert own.exchange[2].end < own.backward[1].end


def test_atc_during_backward_steps_a_layer_before_it_is_exchanged(fleet: Fleets, traces: Path) -> None:
    name = "atc during backward"
    for step in train(fleet(2), traces, name, WAYS[name], lambda pace: None):
        assert len(step.local) == LAYERS
        for local, layer in zip(step.local, (3, 2, 1), strict=True):
            assert step.backward[layer].end < local.start < local.end < step.exchange[layer].start


def test_mean_gradients_are_available_before_the_local_step(fleet: Fleets, traces: Path) -> None:
    for step in train(fleet(2), traces, "gradients", WAYS["gradients"], lambda pace: None):
        [local] = step.local
        assert max(exchange.end for exchange in step.exchange.values()) < local.start


def test_atc_without_overlap_exchanges_after_the_backward_and_the_local_step(fleet: Fleets, traces: Path) -> None:
    for step in train(fleet(2), traces, "atc", WAYS["atc"], lambda pace: None):
        [local] = step.local
        for exchange in step.exchange.values():
            assert step.backward[1].end < step.step.start < local.end < exchange.start < exchange.end < step.step.end


def test_gradients_without_overlap_are_exchanged_between_backward_pass_and_local_step(
    fleet: Fleets, traces: Path
) -> None:
    for step in train(fleet(2), traces, "gradients", GRADIENTS, lambda pace: None):
        [local] = step.local
        for exchange in step.exchange.values():
            assert step.backward[1].end < step.step.start < exchange.start < exchange.end < local.start


def test_the_figure_is_drawn_from_a_trace(traces: Path, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(LAYERS)))

    def run() -> None:
        trainings = [Training(name, way, deepcopy(model)) for name, way in WAYS.items()]
        for training in 2 * trainings:
            training.iterate(torch.ones(1, 8))

    shoal.Fleet(2, timeout=20.0).run(run)
    steps = {name: quickest(traces / "shoal-rank0.json", name) for name in WAYS}
    for bars in steps.values():
        Step(bars)
        assert min(bar.start for bar in bars) == 0
        assert max(bar.end for bar in bars) == next(bar.end for bar in bars if bar.what == "iteration")
    draw(steps, tmp_path / "overlap.png")
    for picture in (tmp_path / "overlap.png", PICTURE):
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
