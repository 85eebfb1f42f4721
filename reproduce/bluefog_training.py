"""BlueFog paper, figure 13, tables II and III: accuracy of decentralized training beside parallel SGD.

    python reproduce/bluefog_training.py                    # digits (scikit-learn)
    python reproduce/bluefog_training.py --data FOLDER      # CIFAR-10, the folder cifar-10-batches-py: hours on 2 cores

16 simulated agents train in every way of table III (three forms of momentum, on the static and the dynamic exponential
graph) and of table II (adapt then combine and adapt with combine, over dynamic inner-outer graphs or hierarchical). The
samples are dealt out by a Dirichlet distribution, so that agents see few labels each and the ways can differ. Every way
has the learning rate that is best on another seed. Seconds are those of the network model for ResNet-50 on 8 machines
of 8 GPUs, where a connection gets 10 Gbit/s (Ying et al. 2021, arXiv:2111.04287, section VII-B).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from _common import Claim, Interval, Report, arguments, exceeds, within
from shoal.algorithms import (
    Algorithm,
    AveragedMomentum,
    GradientDescent,
    Momentum,
    ParallelGradientDescent,
    QuasiGlobalMomentum,
)
from shoal.netmodel import simulate
from shoal.sim import StackedFleet
from shoal.topology import (
    AllReduce,
    ExponentialTwoGraph,
    InnerOuterExponential,
    Kronecker,
    OnePeerExponential,
    Schedule,
    as_schedule,
)

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from _adam_tasks import Task, cifar10, digits
from papers.clusters import (
    AWS_FLOW,
    BACKWARD,
    RESNET_50,
    STYLES,
    efficiency,
    figure_12_network,
    hierarchical_steps,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AGENTS, PER_MACHINE, GPUS = 16, 4, 64
ALPHA, BETA = 0.1, 0.9
RATES = (0.8, 0.4, 0.2)
TUNED_ON = 1000
"""Seed of the run that a way's learning rate is chosen on. Results have the seeds 0, 1, ..."""
PARTS = 10
"""The learning rate falls along a cosine so many times, and as often accuracy is measured."""
POINT = 1.0
"""Percentage points that count as no noticeable difference. In table III the largest is 0.5."""
PARALLEL = "parallel SGD"


@dataclass(frozen=True)
class Way:
    """How to train.

    Attributes:
        make: The algorithm of a learning rate.
        topology: Of so many agents on machines of so many.
        messages: The models that a step sends: 2 if the momentum is averaged too.
    """

    make: Callable[[float], Algorithm]
    topology: Callable[[int, int], Schedule]
    messages: int = 1


def _static(size: int, local: int) -> Schedule:
    return as_schedule(ExponentialTwoGraph(size))


def _dynamic(size: int, local: int) -> Schedule:
    return OnePeerExponential(size)


def _hierarchical(size: int, local: int) -> Schedule:
    return Kronecker(OnePeerExponential(size // local), AllReduce(local))


def _momentum(lr: float) -> Algorithm:
    return Momentum(GradientDescent(lr), BETA)


def _awc(lr: float) -> Algorithm:
    return Momentum(GradientDescent(lr, atc=False), BETA)


STATIC, DYNAMIC = ", static", ", dynamic"
VANILLA, DMSGD, QG = "vanilla DmSGD", "DmSGD", "QG-DmSGD"
ATC, AWC, H_ATC, H_AWC = "ATC", "AWC", "H-ATC", "H-AWC"
_MOMENTA: dict[str, tuple[Callable[[float], Algorithm], int]] = {
    VANILLA: (_momentum, 1),
    DMSGD: (lambda lr: AveragedMomentum(lr, BETA, together=True), 2),
    QG: (lambda lr: QuasiGlobalMomentum(lr, BETA), 1),
}
TABLE_3 = {
    name + graph: Way(make, topology, messages)
    for name, (make, messages) in _MOMENTA.items()
    for graph, topology in ((STATIC, _static), (DYNAMIC, _dynamic))
}
TABLE_2 = {
    ATC: Way(_momentum, InnerOuterExponential),
    AWC: Way(_awc, InnerOuterExponential),
    H_ATC: Way(_momentum, _hierarchical),
    H_AWC: Way(_awc, _hierarchical),
}
WAYS = {
    PARALLEL: Way(lambda lr: Momentum(ParallelGradientDescent(lr), BETA), lambda size, local: AllReduce(size)),
    **TABLE_3,
    **TABLE_2,
}


@dataclass(frozen=True)
class Curve:
    """One training: values after each part, of the mean over the agents' own models.

    Attributes:
        loss: On what is trained on.
        accuracy: In %, on samples that nobody trains on.
    """

    loss: list[float]
    accuracy: list[float]


def train(way: str, task: Task, rate: float, steps: int) -> list[Curve]:
    """A training of all runs of a task at once, with a rate that falls along a cosine; a curve for each run.

    Row i of the fleet has agent i of every run, one after the other: all runs have the same topology.
    """
    start = task.start()  # [runs, agents, d]
    runs, _, d = start.shape

    def by_agent(x: Tensor) -> Tensor:
        return x.transpose(0, 1).reshape(AGENTS, runs * d)

    def by_run(x: Tensor) -> Tensor:
        return x.view(AGENTS, runs, d).transpose(0, 1)

    fleet = StackedFleet(WAYS[way].topology(AGENTS, PER_MACHINE))
    run, curves = None, [Curve([], []) for _ in range(runs)]
    for part in range(PARTS):
        algorithm = WAYS[way].make(rate * (1 + math.cos(math.pi * part / PARTS)) / 2)
        run = fleet.run(
            algorithm, by_agent(start), lambda x: by_agent(task.gradient(by_run(x))), steps // PARTS, resume=run
        )
        for number, x in enumerate(by_run(run.estimate)):
            some = torch.randperm(len(task.targets[number]), generator=torch.Generator().manual_seed(0))[:500]
            inputs, targets = task.inputs[number][some], task.targets[number][some]
            curves[number].loss.append(_mean(task, x, inputs, targets, cross_entropy))
            curves[number].accuracy.append(100 * _mean(task, x, *task.tests[number], _hits))
    return curves


def _hits(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(-1) == targets).float().mean()


def _mean(task: Task, x: Tensor, inputs: Tensor, targets: Tensor, measure: Callable[[Tensor, Tensor], Tensor]) -> float:
    """The mean over samples and agents of a measure of outputs and targets; x is [agents, d]."""
    total = 0.0
    for some, expected in zip(inputs.split(500), targets.split(500), strict=True):
        outputs = task._stacked.outputs(x, some.expand(len(x), *some.shape)).flatten(0, 1)
        total += len(some) * float(measure(outputs, expected.repeat(len(x))))
    return total / len(inputs)


def tuned(way: str, task: Task, steps: int, rates: Sequence[float]) -> tuple[float, list[Curve]]:
    """The rate with the best accuracy of the task's last run at the end, and the curves of the other runs with it."""

    def score(curves: list[Curve]) -> float:
        last = curves[-1]
        return last.accuracy[-1] if math.isfinite(last.loss[-1]) else 0.0

    found = {rate: train(way, task, rate, steps) for rate in rates}
    rate = max(found, key=lambda one: score(found[one]))
    return rate, found[rate][:-1]


def seconds_of_step(way: str) -> float:
    """Of ResNet-50 on 64 GPUs, as the network model predicts.

    The ways of table II are those of figure 12. The graphs of table III are graphs of machines, whose GPUs average
    first, as in the paper that it is from (Ying et al. 2021, arXiv:2110.13363).
    """
    network = figure_12_network(GPUS, AWS_FLOW)
    styles = {style.name: style for style in STYLES}
    style = "Horovod, ring all-reduce" if way == PARALLEL else f"BlueFog {way}"
    if style in styles:
        return RESNET_50.compute / efficiency(network, RESNET_50, styles[style])
    one = WAYS[way]
    nbytes = one.messages * RESNET_50.nbytes
    plan = hierarchical_steps(network, nbytes, 24, one.topology(network.machines, 1))
    return simulate(network, plan, RESNET_50.compute, overlap=BACKWARD).seconds_per_step(skip=8)


def claims(accuracy: dict[str, Sequence[float]], seconds: dict[str, float]) -> list[Claim]:
    """The paper's statements against accuracies, one for each seed, and the model's seconds of a step."""
    parallel = accuracy[PARALLEL]
    found = [
        within(f"{way} ends as accurate as parallel SGD (table III)", accuracy[way], parallel, by=POINT, unit=" %")
        for way in TABLE_3
    ]
    found += [
        within(
            f"{name} is as accurate on the dynamic graph as on the static one (table III)",
            accuracy[name + DYNAMIC],
            accuracy[name + STATIC],
            by=POINT,
            unit=" %",
        )
        for name in _MOMENTA
    ]
    gains = {way: seconds[PARALLEL] / seconds[way] for way in WAYS if way != PARALLEL}
    slow = " and ".join(way for way, gain in gains.items() if gain <= 1.01)
    faster = {name: seconds[name + STATIC] / seconds[name + DYNAMIC] for name in _MOMENTA}
    found += [
        exceeds("H-ATC is more accurate than ATC (table II)", accuracy[H_ATC], accuracy[ATC], unit=" %"),
        exceeds("H-AWC is more accurate than AWC (table II)", accuracy[H_AWC], accuracy[AWC], unit=" %"),
        exceeds("ATC is more accurate than AWC (table II)", accuracy[ATC], accuracy[AWC], unit=" %"),
        Claim(
            "The dynamic graph takes less time than the static one (table III), model",
            ", ".join(f"{name} {ratio:.2f} times as fast" for name, ratio in faster.items()),
            min(faster.values()) > 1.01,
        ),
        Claim(
            "Decentralized training takes less time than parallel SGD (figure 13, tables II and III), model",
            f"{min(gains.values()):.2f} to {max(gains.values()):.2f} times as fast; not faster: {slow or 'none'}",
            min(gains.values()) > 1.01,
        ),
    ]
    return found


def draw(figure: Figure, curves: dict[str, list[Curve]], seconds: dict[str, float], steps: int) -> None:
    """Figure 13: loss and accuracy over time, and accuracy over steps, of the ways of table II."""
    axes = figure.subplots(1, 3)
    after = steps // PARTS * np.arange(1, PARTS + 1)
    for way in (PARALLEL, *TABLE_2):
        loss = np.mean([one.loss for one in curves[way]], axis=0)
        accuracy = np.array([one.accuracy for one in curves[way]])
        (line,) = axes[0].plot(after * seconds[way], loss, label=way)
        axes[1].plot(after * seconds[way], accuracy.mean(0), label=way)
        axes[2].plot(after, accuracy.mean(0), label=way)
        if len(accuracy) > 1:
            reach = [Interval.of(column).reach for column in accuracy.T]
            low, high = accuracy.mean(0) - reach, accuracy.mean(0) + reach
            axes[2].fill_between(after, low, high, alpha=0.15, color=line.get_color())
    for one, title, label in zip(
        axes,
        ("training loss", "accuracy, %", "accuracy, %"),
        ("seconds (model)", "seconds (model)", "steps"),
        strict=True,
    ):
        one.set(title=title, xlabel=label)
        one.grid(alpha=0.25)
        one.spines[["top", "right"]].set_visible(False)
    axes[0].set_yscale("log")
    axes[0].legend(frameon=False, fontsize=8)
    low = min(curve.accuracy[1] for several in curves.values() for curve in several)
    axes[1].set_ylim(bottom=low - 1)
    axes[2].set_ylim(bottom=low - 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, seeds=20)
    parser.add_argument("--data", metavar="FOLDER", help="CIFAR-10: the folder cifar-10-batches-py, or that it lies in")
    parser.add_argument("--steps", type=int, help="of every agent (600; 40 if --quick)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report = Report(__file__, "BlueFog: accuracy of training (figure 13, tables II and III)", args)
    steps = args.steps or (40 if args.quick else 600)
    seeds = [*range(args.seeds), TUNED_ON]
    task = cifar10(AGENTS, seeds, ALPHA, args.data) if args.data else digits(AGENTS, seeds, ALPHA)
    curves, rates, seconds = {}, {}, {}
    for way in WAYS:
        rates[way], curves[way] = tuned(way, task, steps, RATES[1:2] if args.quick else RATES)
        seconds[way] = seconds_of_step(way)
        score = Interval.of(one.accuracy[-1] for one in curves[way])
        report.say(f"{way}: accuracy {score:.2f} %, rate {rates[way]}, {1e3 * seconds[way]:.0f} ms a step by the model")
    accuracy = {way: [one.accuracy[-1] for one in several] for way, several in curves.items()}
    report.table(
        f"{'CIFAR-10' if args.data else 'Digits'}, Dirichlet({ALPHA}), {AGENTS} agents, {steps} steps, mean accuracy",
        ["way", "learning rate", "accuracy, %", "ms a step (model)", "speed-up (model)"],
        [
            [
                way,
                f"{rates[way]:g}",
                f"{Interval.of(accuracy[way]):.2f}",
                f"{1e3 * seconds[way]:.0f}",
                f"{seconds[PARALLEL] / seconds[way]:.2f}",
            ]
            for way in WAYS
        ],
    )
    report.claim(claims(accuracy, seconds))
    report.figure(lambda figure: draw(figure, curves, seconds, steps), (11, 3.8))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
