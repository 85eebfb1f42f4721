"""Ring-Star paper, figures 1 to 3 and tables 3 and 4: accuracy and cost of sparse topologies for 16, 32 and 64 workers.

    python reproduce/ring_star.py                              # digits and two-digit numbers
    python reproduce/ring_star.py --only figure1               # or: tables time
    python reproduce/ring_star.py --data FOLDER --only tables  # CIFAR-10 in place of the digits

All workers are simulated, as the rows of one tensor (Jameel et al. 2019, doi 10.1007/978-3-030-43823-4_28). Each has an
equal shard of its own, takes a step of SGD and averages (equations 1 and 2). The learning rates are those of table 2: a
warm-up from 0.1 to 0.1 * 32 V / 256 for V workers with batches of 32 (Goyal et al. 2017), a tenth of it from one half
of the epochs on, a hundredth from three quarters on. EASGD's is not scaled: with the scaled one it diverges. Models,
tasks and batches are smaller than the paper's, and epochs fewer. The paper does not say which model it tests. So both
are here: the workers' own models (the mean of their accuracies), and the mean of all models (of EASGD the center).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shoal.algorithms import EASGD, Algorithm, GradientDescent
from shoal.algorithms.runs.run import Run
from shoal.netmodel import Messages, simulate
from shoal.sim import StackedFleet, StackedModel, loss_of, per_agent
from shoal.topology import AllReduce, RingGraph, RingRandom, RingStar, average_age
from shoal.topology.analysis.cost import alpha_beta, relative_gain
from shoal.topology.families.static import ring
from shoal.topology.schedule import as_schedule

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "examples")]

from _common import Claim, Interval, Report, arguments, every, exceeds  # noqa: E402
from papers.clusters import GBIT, ring_star_network, ring_star_steps  # noqa: E402
from papers.protocols import delegates  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GROUP = 4
"""Workers of a group in tables 3 and 4."""
WORKERS = (16, 32, 64)
LR, BATCH, OF_BATCH, WARMUP = 0.1, 32, 256, 5 / 164
LATENCY, BANDWIDTH = 100e-6, 10 * GBIT
"""Of the paper's cluster; the latency is an assumption (benchmarks/papers/clusters.py)."""
MODEL_BYTES = {"ResNet-20, 1 MB": 1e6, "VGG-16, 60 MB": 60e6}
COMPUTE = 0.01
"""Seconds of a step without averaging, an assumption: the paper gives none."""
POINTS = 16
"""Points of a curve."""

ALLREDUCE, RING_STAR, RING_RANDOM, RING, EASGD_ = "Allreduce", "Ring-Star", "RingRandom", "Ring", "EASGD"
METHODS = (ALLREDUCE, RING_STAR, RING_RANDOM, RING, EASGD_)


class OwnModels(EASGD):
    """EASGD whose curves are of the workers' own models, as those of the other methods; its state is the center."""

    def estimate(self, x: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return x


def method(name: str, workers: int, seed: int, group: int = GROUP) -> tuple[Algorithm, object]:
    """The algorithm, of step 1 because the schedule is the learning rate, and the topology."""
    if name == EASGD_:  # every worker averages in every step, as with the other methods
        return OwnModels(1.0, every=1), AllReduce(workers)
    topologies = {
        ALLREDUCE: lambda: AllReduce(workers),
        RING_STAR: lambda: RingStar(workers, group),
        RING_RANDOM: lambda: RingRandom(workers, seed),
        RING: lambda: RingGraph(workers),
    }
    return GradientDescent(1.0), topologies[name]()


@dataclass(frozen=True)
class Task:
    """Images float32 [samples, ...] and labels int64 [samples], to train on and to test with, and a network for them.

    Attributes:
        name: of the task.
        train, test: images and labels.
        make: a network with first weights that torch's generator draws.
        batch: images of a worker's batch.
        epochs: how many.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    make: Callable[[], nn.Module]
    batch: int
    epochs: int


def perceptron(pixels: int, hidden: int, classes: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def _digits(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Scikit-learn's digits, pixels [m, 8, 8] in 0 to 1 and labels: 1344 to train on, which 64 divides, and 453."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("the digits come with scikit-learn. Run: pip install 'shoal[demo]'") from None
    found = load_digits()
    order = np.random.default_rng(seed).permutation(len(found.target))
    images = torch.from_numpy(found.images[order]).float().div(16)
    labels = torch.from_numpy(found.target[order]).long()
    return (images[:1344], labels[:1344]), (images[1344:], labels[1344:])


def digits(seed: int, epochs: int) -> Task:
    train, test = ((images.flatten(1), labels) for images, labels in _digits(seed))
    return Task("digits, 10 classes", train, test, perceptron(64, 64, 10), 4, epochs)


def numbers(seed: int, epochs: int) -> Task:
    """Numbers from 00 to 99: pairs of digits side by side, 3,200 to train on and 500 to test with."""
    chance = torch.Generator().manual_seed(seed)

    def pairs(images: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
        left, right = torch.randint(len(labels), (2, count), generator=chance)
        return torch.cat([images[left], images[right]], 2).flatten(1), 10 * labels[left] + labels[right]

    train, test = _digits(seed)
    made = pairs(*train, 3200), pairs(*test, 500)
    return Task("two-digit numbers, 100 classes", *made, perceptron(128, 64, 100), 8, epochs)


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


@lru_cache(1)
def _cifar10(folder: str, images: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    from _cifar10 import load

    train, test = load(folder, images, 2000)
    prepared = [(one.pixels.float().sub_(120).div_(64), one.labels) for one in (train, test)]
    return prepared[0], prepared[1]


def cifar10(folder: str, epochs: int, images: int = 0) -> Task:
    """The first images (all if 0), without augmentation, and 2,000 to test with."""
    return Task("CIFAR-10", *_cifar10(folder, images), convolutions, 32, epochs)


class Shards:
    """The workers' data, the gradients of their batches, and the learning rate.

    Args:
        task: Its training data are shuffled and divided equally; a remainder is left out.
        workers: V.
        seed: Of the shards and the network.
        scaled: Scale the learning rate with the number of workers.

    Attributes:
        network: with the first weights of all workers.
        gradient: for a fleet; each worker takes passes over its shard.
        steps: of the whole run.
        steps_per_epoch: of each worker.
    """

    def __init__(self, task: Task, workers: int, seed: int, scaled: bool = True) -> None:
        inputs, targets = task.train
        each = len(targets) // workers
        if each < task.batch:
            raise SystemExit(f"{len(targets)} images are too few for {workers} workers with batches of {task.batch}")
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))[: each * workers]
        torch.manual_seed(seed)
        self.network = task.make()
        shards = inputs[order].unflatten(0, (workers, each)), targets[order].view(workers, each)
        self.gradient = per_agent(loss_of(self.network, cross_entropy), *shards, batch=task.batch, epochs=True)
        self._most = LR * max(1.0, workers * BATCH / OF_BATCH) if scaled else LR
        self.steps_per_epoch = each // task.batch
        self.steps = self.steps_per_epoch * task.epochs

    def rate(self, step: int) -> float:
        """The learning rate: warm-up, and two decays by ten."""
        passed = step / self.steps
        if passed < WARMUP:
            return LR + (self._most - LR) * passed / WARMUP
        return self._most * (1.0 if passed < 0.5 else 0.1 if passed < 0.75 else 0.01)


@dataclass(frozen=True)
class Trained:
    """One run: accuracies in percent of test images.

    Attributes:
        own: the mean accuracy of the workers' own models at the end.
        mean: the accuracy of the mean model, of EASGD the center.
        steps, curve: steps, and the workers' accuracy after them.
        steps_per_epoch: of each worker.
    """

    own: float
    mean: float
    steps: list[float]
    curve: list[float]
    steps_per_epoch: int


def train(task: Task, name: str, workers: int, seed: int, group: int = GROUP) -> Trained:
    # The rule of scaling is for workers that average completely; EASGD's nearly train alone, and diverge with it.
    shards = Shards(task, workers, seed, scaled=name != EASGD_)
    stacked = StackedModel(shards.network, workers)
    algorithm, topology = method(name, workers, seed, group)
    images, labels = task.test

    def accuracy(x: Tensor) -> float:
        """Over all rows of x and all test images."""
        right = 0
        for some, wanted in zip(images.split(500), labels.split(500), strict=True):
            found = stacked.outputs(x, some.expand(len(x), *some.shape)).argmax(-1)
            right += int((found == wanted).sum())
        return 100 * right / len(x) / len(labels)

    run: Run = StackedFleet(topology, seed=seed).run(
        algorithm,
        stacked.start,
        shards.gradient,
        shards.steps,
        lr_lambda=shards.rate,
        measure=lambda x: {"accuracy": accuracy(x)},
        every=max(1, shards.steps // POINTS),
    )
    middle = run.state[0][:1] if name == EASGD_ else run.x.mean(0, keepdim=True)
    curve = run.column("accuracy").tolist()
    return Trained(curve[-1], accuracy(middle), run.column("step").tolist(), curve, shards.steps_per_epoch)


# Figure 1


def messages(topology: str, workers: int, group: int, nbytes: float) -> list[list[Messages]]:
    """One averaging on the paper's cluster; several of RingRandom, which differ."""
    if topology == RING_STAR:
        steps = delegates(ring(workers // group), group, nbytes)
        return [[Messages.of(source, destination, size) for source, destination, size in steps]]
    return ring_star_steps(workers, nbytes)[topology]


def seconds(topology: str, workers: int, group: int, nbytes: float) -> float:
    """Of one averaging on the paper's cluster, by the network model."""
    return simulate(ring_star_network(workers), messages(topology, workers, group, nbytes)).seconds_per_step()


def formula_seconds(topology: str, workers: int, group: int, nbytes: float) -> float:
    """Of one averaging, by the formula of the paper's table 1."""
    handshakes = {ALLREDUCE: 2 * (workers - 1), RING: 2, RING_RANDOM: 2, RING_STAR: 2 * (group - 1) + 2}[topology]
    return alpha_beta(handshakes, 2 * nbytes, LATENCY, BANDWIDTH)


@dataclass(frozen=True)
class Configuration:
    """A row of figure 1: a topology with its average age, its seconds of an averaging, and accuracies by seed."""

    name: str
    group: int
    age: float
    formula: float
    modelled: float
    own: list[float]
    mean: list[float]


def figure_1_claims(stars: Sequence[Configuration], others: dict[str, Configuration]) -> list[Claim]:
    """The statements of section 2.4 on figure 1."""
    inside = [one for one in stars if 1 < one.group < stars[-1].group]

    def all_below(paper: str, value: Callable[[Configuration], float], other: Configuration) -> Claim:
        gains = {one.name: relative_gain(value(other), value(one)) for one in inside}
        listed = ", ".join(f"{name} {gain:.3g}" for name, gain in gains.items())
        return Claim(paper, f"relative gains {listed}", min(gains.values()) > 1)

    found = [
        all_below(f"Figure 1: every Ring-Star has a lower age than {name}", lambda one: one.age, others[name])
        for name in (RING, RING_RANDOM)
    ]
    found.append(
        all_below(
            "Figure 1: every Ring-Star costs less than Allreduce (1 MB, table 1's formula)",
            lambda one: one.formula,
            others[ALLREDUCE],
        )
    )
    for name in (RING, RING_RANDOM):
        ahead = {one.name: exceeds("", one.own, others[name].own).holds for one in inside}
        worse = [star for star, holds in ahead.items() if not holds]
        lead = [min(row) - of for *row, of in zip(*(one.own for one in inside), others[name].own, strict=True)]
        found.append(
            Claim(
                f"Figure 1: every Ring-Star has a lower test error than {name}",
                f"the worst leads by {Interval.of(lead):.2f} points"
                + (f"; not separated: {', '.join(worse)}" if worse else ""),
                every(ahead.values()),
            )
        )
    for one, name in ((stars[0], RING), (stars[-1], ALLREDUCE)):
        apart = max(abs(a - b) for a, b in zip(one.own, others[name].own, strict=True))
        paper = f"Figure 1: {one.name} is {name} (section 2.4)"
        found.append(Claim(paper, f"accuracies differ by {apart:.2f} points at most", apart < 0.5))
    return found


def figure_1(report: Report, task: Callable[[int], Task], seeds: int, workers: int) -> list[Configuration]:
    nbytes = MODEL_BYTES["ResNet-20, 1 MB"]

    def measured(name: str, group: int) -> Configuration:
        title = f"[{workers // group} x {group}]" if name == RING_STAR else name
        runs = [train(task(seed), name, workers, seed, group) for seed in range(seeds)]
        _, topology = method(name, workers, 0, group)
        one = Configuration(
            title,
            group,
            average_age(as_schedule(topology)).mean,  # type: ignore[arg-type]
            formula_seconds(name, workers, group, nbytes),
            seconds(name, workers, group, nbytes),
            [run.own for run in runs],
            [run.mean for run in runs],
        )
        report.say(f"figure 1, {title}: age {one.age:.3g}, accuracy {Interval.of(one.own):.2f}%")
        return one

    groups = [2**power for power in range(workers.bit_length())]
    stars = [measured(RING_STAR, group) for group in groups]
    others = {name: measured(name, 1) for name in (ALLREDUCE, RING_RANDOM, RING)}

    def gains(one: Configuration, value: Callable[[Configuration], float]) -> str:
        return ", ".join(f"{relative_gain(value(others[name]), value(one)):.2f}" for name in others)

    def error(one: Configuration) -> float:
        return 100 - fmean(one.own)

    rows = [
        [
            one.name,
            f"{one.age:.2f}",
            f"{1e3 * one.formula:.2f} ({1e3 * one.modelled:.2f})",
            f"{Interval.of(one.own):.2f}",
            f"{Interval.of(one.mean):.2f}",
            gains(one, lambda one: one.age),
            gains(one, lambda one: one.formula),
            gains(one, error),
        ]
        for one in [*stars, *others.values()]
    ]
    report.table(
        f"Figure 1: Ring-Star [G x L] of {workers} workers. Cost in ms of averaging 1 MB, by formula (by the network "
        "model). Relative gains over Allreduce, RingRandom and Ring, above 1 where the row is better",
        ["", "age", "cost, ms", "% of own models", "% of the mean", "gain in age", "gain in cost", "gain in error"],
        rows,
    )
    report.claim(figure_1_claims(stars, others))
    return [*stars, *others.values()]


# Tables 3 and 4

Runs = dict[tuple[str, int], list[Trained]]
"""By method and number of workers, one for each seed."""


def table_claims(
    table: str, own: dict[tuple[str, int], list[float]], mean: dict[tuple[str, int], list[float]]
) -> list[Claim]:
    """The statements of section 3.1, against final accuracies in percent by method and workers, one for each seed."""
    sizes = sorted({workers for _, workers in own})
    least, most = sizes[0], sizes[-1]
    ranked = [name for name in METHODS if (name, most) in own][1:]

    def apart(workers: int) -> Interval:
        return Interval.of(a - b for a, b in zip(own[ALLREDUCE, workers], own[RING_STAR, workers], strict=True))

    def lost(name: str) -> list[float]:
        return [a - b for a, b in zip(own[name, least], own[name, most], strict=True)]

    below = {workers: apart(workers) for workers in sizes}
    return [
        Claim(
            f"{table}: Ring-Star is at most 1 point below Allreduce, with any number of workers (own models)",
            ", ".join(f"with {workers} {one:.2f} below" for workers, one in below.items()),
            every(one.between(most=1) for one in below.values()),
        ),
        *(
            ordered(
                f"{table}, {most} workers: {' > '.join(ranked)} ({what})", {name: of[name, most] for name in ranked}
            )
            for what, of in (("own models", own), ("mean models", mean))
        ),
        *(
            [
                ordered(
                    f"{table}: {least} to {most} workers: the loss of accuracy is {' > '.join(reversed(ranked))} "
                    "(own models)",
                    {name: lost(name) for name in reversed(ranked)},
                )
            ]
            if least < most
            else []
        ),
    ]


def epoch_claims(task: str, runs: Runs) -> list[Claim]:
    """The statements of section 3.1 on figure 2, against the curves of the two largest numbers of workers.

    Args:
        task: The name in the claims.
        runs: Of all methods and numbers of workers.
    """
    leads: dict[tuple[str, int], Interval] = {}
    sizes = sorted({workers for _, workers in runs})[-2:]
    for workers in sizes:
        mean = {name: [fmean(run.curve) for run in runs[name, workers]] for name in METHODS[:4]}
        for name in (ALLREDUCE, RING_RANDOM, RING):
            leads[name, workers] = Interval.of(a - b for a, b in zip(mean[RING_STAR], mean[name], strict=True))

    def listed(*names: str) -> str:
        return "; ".join(
            f"{workers} workers: {', '.join(f'{leads[name, workers]:.2f} above {name}' for name in names)}"
            for workers in sizes
        )

    return [
        Claim(
            f"Figure 2, {task}: Ring-Star learns faster than RingRandom and Ring (mean of the curve, points)",
            listed(RING_RANDOM, RING),
            every(leads[name, workers].between(0) for name in (RING_RANDOM, RING) for workers in sizes),
        ),
        Claim(
            f"Figure 2, {task}: the curve of Ring-Star is on average at most 1 point below that of Allreduce",
            listed(ALLREDUCE),
            every(leads[ALLREDUCE, workers].between(-1) for workers in sizes),
        ),
    ]


def ordered(paper: str, values: dict[str, Sequence[float]]) -> Claim:
    """Claim that values fall from each name to the next: the interval of each difference, seed by seed, is above 0."""
    steps = [
        (better, worse, Interval.of(a - b for a, b in zip(values[better], values[worse], strict=True)))
        for better, worse in itertools.pairwise(values)
    ]
    measured = "; ".join(f"{better} - {worse} {one:.2f}" for better, worse, one in steps)
    return Claim(paper, measured, every(one.between(0) for *_, one in steps))


def tables(
    report: Report, table: str, task: Callable[[int], Task], names: Sequence[str], sizes: Sequence[int], seeds: int
) -> Runs:
    found: Runs = {}
    for workers in sizes:
        for name in names:
            runs = found[name, workers] = [train(task(seed), name, workers, seed) for seed in range(seeds)]
            own, mean = Interval.of(run.own for run in runs), Interval.of(run.mean for run in runs)
            report.say(f"{table}, {workers} workers, {name}: {own:.2f}%, mean model {mean:.2f}%")

    def cells(pick: Callable[[Trained], float], workers: int) -> list[str]:
        return [f"{Interval.of(pick(run) for run in found[name, workers]):.2f}" for name in names]

    rows = [
        [f"{workers} [{workers // GROUP}x{GROUP}], {model}", *cells(pick, workers)]
        for workers in sizes
        for model, pick in (("own", lambda run: run.own), ("mean", lambda run: run.mean))
    ]
    report.table(f"{table}, {task(0).name}: % of test images, own models and mean model", ["workers", *names], rows)
    own = {key: [run.own for run in runs] for key, runs in found.items()}
    mean = {key: [run.mean for run in runs] for key, runs in found.items()}
    report.claim(table_claims(table, own, mean))
    report.claim(epoch_claims(task(0).name, found))
    return found


# Figures 2 and 3


def reached(steps: Sequence[float], curve: Sequence[float], target: float) -> float:
    """Steps until the curve is at the target, interpolated; twice the run if it never is."""
    for (low, before), (high, after) in zip(
        zip(steps, curve, strict=True), zip(steps[1:], curve[1:], strict=True), strict=False
    ):
        if after >= target:
            return high if after == before else low + (high - low) * max(0.0, target - before) / (after - before)
    return 2 * steps[-1]


def time_claims(runs: dict[str, list[Trained]], step_seconds: dict[str, dict[str, float]]) -> list[Claim]:
    """The statements of section 3.2.

    Args:
        runs: by method, one for each seed.
        step_seconds: of a step, by model and method.
    """
    found = []
    for model, each in step_seconds.items():
        # The lowest of the two final accuracies, less half a point, is what both can reach.
        goals = [min(a.own, b.own) - 0.5 for a, b in zip(runs[ALLREDUCE], runs[RING_STAR], strict=True)]
        times = {
            name: [
                each[name] * reached(run.steps, run.curve, goal) for run, goal in zip(runs[name], goals, strict=True)
            ]
            for name in (ALLREDUCE, RING_STAR)
        }
        paper = f"Figure 3, {model}: Allreduce takes longer than Ring-Star to its accuracy"
        found.append(exceeds(paper, times[ALLREDUCE], times[RING_STAR], spec=".2f", unit=" s"))
        ratios = {name: each[ALLREDUCE] / each[name] for name in (RING_STAR, RING_RANDOM, RING)}
        found.append(
            Claim(
                f"Figure 3, {model}: steps of Allreduce take longer than those of the sparse topologies",
                ", ".join(f"{ratio:.2f} times as long as {name}'s" for name, ratio in ratios.items()),
                min(ratios.values()) > 1,
            )
        )
        ratio = each[RING_STAR] / each[RING]
        paper = f"Figure 3, {model}: Ring-Star communicates about as cheaply as Ring"
        found.append(Claim(paper, f"its step takes {ratio:.2f} times as long, at most 1.1 allowed", ratio <= 1.1))
    return found


def times(report: Report, runs: Runs) -> dict[str, dict[str, float]]:
    workers = max(size for _, size in runs)
    names = [name for name in METHODS[:4] if (name, workers) in runs]
    of_size = {name: runs[name, workers] for name in names}
    found = {
        model: {name: COMPUTE + seconds(name, workers, GROUP, nbytes) for name in names}
        for model, nbytes in MODEL_BYTES.items()
    }
    report.table(
        f"Figure 3: ms of a step of {workers} workers, of which {1e3 * COMPUTE:g} ms compute, on the paper's cluster "
        "by the network model",
        ["model", *names],
        [[model, *(f"{1e3 * each[name]:.2f}" for name in names)] for model, each in found.items()],
    )
    report.note(
        f"The paper gives no seconds of a step; {1e3 * COMPUTE:g} ms are an assumption (`--compute`), and so is the "
        "latency of 100 us. The bytes of a model are the paper's; the curves are of this run's tasks."
    )
    report.claim(time_claims(of_size, found))
    return found


# Figures


def draw_curves(axes: Axes, runs: dict[str, list[Trained]], along: Callable[[str, Trained], float]) -> None:
    """The mean accuracy over seeds against steps times a factor, and bands of their range."""
    for name, of_seeds in runs.items():
        curves = torch.tensor([run.curve for run in of_seeds])
        x = [along(name, of_seeds[0]) * step for step in of_seeds[0].steps]
        (line,) = axes.plot(x, curves.mean(0), label=name, linewidth=1.6)
        axes.fill_between(x, curves.amin(0), curves.amax(0), color=line.get_color(), alpha=0.15)
    best = max(max(run.curve) for of_seeds in runs.values() for run in of_seeds)
    axes.set_ylim(best - 25, best + 2)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw(
    figure: Figure, shown: list[Configuration], runs: dict[str, Runs], clocks: dict[str, dict[str, float]]
) -> None:
    """Figure 1 above, figure 2 in the middle, figure 3 below; each only if it was measured."""
    panels: list[Callable[[Axes], None]] = []
    if shown:
        panels += [lambda axes: draw_figure_1(axes, shown, "age"), lambda axes: draw_figure_1(axes, shown, "accuracy")]
    for task, found in runs.items():
        for workers in sorted({size for _, size in found})[-2:]:

            def by_epoch(axes: Axes, task: str = task, found: Runs = found, workers: int = workers) -> None:
                some = {name: one for (name, size), one in found.items() if size == workers}
                draw_curves(axes, some, lambda _, run: 1 / run.steps_per_epoch)
                axes.set(title=f"figure 2: {task}, {workers} workers", xlabel="epoch", ylabel="% of test images")

            panels.append(by_epoch)
    if clocks and runs:
        found = next(iter(runs.values()))
        most = max(size for _, size in found)
        for model, each in clocks.items():

            def by_time(axes: Axes, model: str = model, each: dict[str, float] = each) -> None:
                some = {name: found[name, most] for name in each}
                draw_curves(axes, some, lambda name, _: each[name])
                axes.set(title=f"figure 3: {model}, {most} workers", xlabel="modelled seconds")

            panels.append(by_time)
    rows = -(-len(panels) // 2)
    for panel, axes in zip(panels, figure.subplots(rows, 2, squeeze=False).flat, strict=False):
        panel(axes)
        axes.legend(frameon=False, fontsize=8)


def draw_figure_1(axes: Axes, shown: Iterable[Configuration], what: str) -> None:
    stars = [one for one in shown if one.name.startswith("[")]
    others = [one for one in shown if not one.name.startswith("[")]
    names = [one.name for one in stars]
    if what == "age":
        axes.plot(names, [one.age for one in stars], "o-", label="average age, rounds")
        axes.plot(names, [1e3 * one.formula for one in stars], "s-", label="cost, ms")
        axes.set(title="figure 1: age and cost of Ring-Star", yscale="log")
    else:
        values = [Interval.of(one.own) for one in stars]
        axes.errorbar(names, [one.mean for one in values], [one.reach for one in values], fmt="o-", label="Ring-Star")
        for one, style in zip(others, ("-", "--", ":"), strict=True):
            axes.axhline(fmean(one.own), linestyle=style, color="gray", label=one.name)
        axes.set(title="figure 1: accuracy of Ring-Star", ylabel="% of test images")
    axes.grid(alpha=0.25)


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__, seeds=5)
    parts = ["figure1", "tables", "time"]
    made.add_argument("--only", nargs="+", choices=parts, default=parts, help="parts of the experiment (all)")
    made.add_argument("--workers", nargs="+", type=int, default=list(WORKERS), help="of the tables (16 32 64)")
    made.add_argument("--epochs", type=int, help="(20, also of CIFAR-10; 4 if --quick)")
    made.add_argument("--data", help="the folder cifar-10-batches-py, in place of the digits")
    made.add_argument("--images", type=int, default=0, help="take only so many of CIFAR-10's to train on")
    made.add_argument("--compute", type=float, default=COMPUTE, help="seconds that a step computes, for figure 3")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    global COMPUTE
    args = parser().parse_args(argv)
    report = Report(__file__, "Ring-Star: figures 1 to 3, tables 3 and 4", args)
    COMPUTE = args.compute
    torch.set_num_threads(1)  # the tensors are small
    epochs = args.epochs or (4 if args.quick else 20)
    sizes = [8, 16] if args.quick else args.workers

    def small(seed: int) -> Task:
        return cifar10(args.data, epochs, args.images) if args.data else digits(seed, epochs)

    shown = figure_1(report, small, args.seeds, max(sizes)) if "figure1" in args.only else []
    runs: dict[str, Runs] = {}
    clocks: dict[str, dict[str, float]] = {}
    if {"tables", "time"} & set(args.only):
        runs["10 classes"] = tables(report, "Table 3", small, METHODS, sizes, args.seeds)
    if "tables" in args.only and not args.data:
        runs["100 classes"] = tables(
            report, "Table 4", lambda seed: numbers(seed, epochs), METHODS[:4], sizes, args.seeds
        )
    if "time" in args.only:
        clocks = times(report, runs["10 classes"])
    panels = 2 * bool(shown) + sum(min(2, len({size for _, size in found})) for found in runs.values()) + len(clocks)
    report.figure(lambda figure: draw(figure, shown, runs, clocks), (10, 3.4 * -(-panels // 2)))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
