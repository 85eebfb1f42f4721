"""BlueFog paper, section IV-B: a school of fish escapes from a predator, and encircles it; figures 5 and 6.

    python reproduce/bluefog_fish_school.py

A fish sees its noisy distance and direction to the predator, takes a gradient step on its estimate w of the predator's
position, and averages w with all fish within a radius, by Metropolis-Hastings weights of that round (listing 2 of Ying
et al. 2021, arXiv:2111.04287). Then it moves by its estimate. 8 real agents, threads of a shoal.Fleet, must swim as 8
simulated ones do; 1,000 simulated fish make the figures. The paper leaves the movement to Tu and Sayed 2011; here a
fish turns away from its estimate, or swims to a circle around it and keeps its distance from fish nearby.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import shoal
import shoal.bluefog as bf
from _common import Claim, Interval, Report, arguments, exceeds
from shoal.algorithms import Algorithm, Gradient, Mix
from shoal.sim import StackedFleet
from shoal.topology import metropolis_hastings_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REAL_FISH, MANY_FISH = 8, 1000
RADIUS = 3.0
"""Fish nearer than this are neighbours."""
GAMMA, NOISE_DISTANCE, NOISE_ANGLE = 0.3, 0.1, 0.1
"""The step; the deviation of the distance, as a share of it, and of the direction, in radians."""
SPEED, TURN = 0.5, 0.5
ESCAPE, ENCIRCLE = "escape", "encircle"


@dataclass(frozen=True)
class School:
    """What depends on the number of fish; lengths are in units in which fish are about 1 apart at first.

    Attributes:
        size: Number of fish.
        extent: Radius of the school at first.
        safe: Distance from the predator at which an escaping fish stops.
        ring: Radius of the circle around the predator.
        rounds: How many.
    """

    size: int
    rounds: int

    @property
    def extent(self) -> float:
        return math.sqrt(self.size / math.pi)

    @property
    def safe(self) -> float:
        return 2.5 * self.extent + 5

    @property
    def ring(self) -> float:
        return max(3.0, 1.1 * self.extent)

    def start(self, chance: torch.Generator) -> Tensor:
        """Positions, evenly in a disc, float64 [size, 2]."""
        radius, angle = torch.rand(2, self.size, dtype=torch.float64, generator=chance)
        return self.extent * radius.sqrt().unsqueeze(1) * _unit(2 * math.pi * angle)

    def predator(self, k: int) -> Tensor:
        """Its position in round k: from outside to the middle of where the school began, in half of the rounds."""
        way = max(0.0, 1 - 2 * k / self.rounds)
        return torch.tensor([way * (self.extent + 1), 0.0], dtype=torch.float64)


def _unit(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], -1)


def _length(x: Tensor) -> Tensor:
    return x.norm(dim=-1, keepdim=True).clamp_min(1e-9)


def between(positions: Tensor) -> Tensor:
    """Distances between all fish, [n, n], without the rounding that a matrix product would bring."""
    return torch.cdist(positions, positions, compute_mode="donot_use_mm_for_euclid_dist")


def neighbours(apart: Tensor) -> Tensor:
    """Which fish see each other, bool [n, n], none itself; ``apart`` has the distances between them."""
    return (apart < RADIUS).fill_diagonal_(False)


def observe(x: Tensor, predator: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Noisy distance [n, 1] and direction [n, 2] from the predator to fish at x; noise is [n, 2], of deviation 1."""
    away = x - predator
    angle = torch.atan2(away[:, 1], away[:, 0]) + NOISE_ANGLE * noise[:, 1]
    return _length(away) * (1 + NOISE_DISTANCE * noise[:, :1]), _unit(angle)


def adapt(w: Tensor, x: Tensor, d: Tensor, u: Tensor) -> Tensor:
    """A gradient step on (d - u (x - w))^2 / 2."""
    residual = d - (u * (x - w)).sum(-1, keepdim=True)
    return w - GAMMA * residual * u


def swim(
    mode: str, school: School, x: Tensor, v: Tensor, w: Tensor, others: Tensor, apart: Tensor
) -> tuple[Tensor, Tensor]:
    """Positions and velocities [m, 2] of some fish after a round.

    Args:
        mode: ``escape`` or ``encircle``.
        school: The school.
        x, v, w: Of these fish: positions, velocities and estimates of the predator, [m, 2].
        others: Positions of all fish, [n, 2].
        apart: Distances of these fish from all, [m, n].
    """
    away, distance = x - w, _length(x - w)
    if mode == ESCAPE:
        wanted = torch.where(distance < school.safe, SPEED * away / distance, 0.0)
    else:
        # The sum over neighbours of (x - x_j) / |x - x_j|^2, as two products; the fish itself adds nothing.
        inverse = (apart < RADIUS) / apart.square().clamp_min(1e-2)
        push = inverse.sum(1, keepdim=True) * x - inverse @ others
        along = torch.stack([-away[:, 1], away[:, 0]], -1) / distance
        wanted = 0.3 * (school.ring - distance) * away / distance + 0.3 * (push * along).sum(-1, keepdim=True) * along
    v = (1 - TURN) * v + TURN * wanted
    v = v * (SPEED / _length(v)).clamp_max(1.0)
    return x + v, v


@dataclass
class Swim:
    """A run.

    Attributes:
        path: Positions after each round, with the first, [rounds + 1, n, 2].
        predator: Its position in each round, [rounds + 1, 2].
        error: Mean distance of the fishes' estimates from the predator in the last tenth of the rounds.
        changed: Share of rounds in which the neighbours of some fish changed, of those in which the school moved.
    """

    path: Tensor
    predator: Tensor
    error: float
    changed: float


def noise_of(school: School, seed: int) -> tuple[Tensor, Tensor]:
    """The start [n, 2] and the noise of all rounds [rounds, n, 2] of a seed."""
    chance = torch.Generator().manual_seed(seed)
    start = school.start(chance)
    return start, torch.randn(school.rounds, school.size, 2, dtype=torch.float64, generator=chance)


@dataclass(frozen=True)
class Swimming(Algorithm):
    """Listing 2 for all fish as rows: x is w; the state is positions and velocities, [n, 2] each."""

    mode: str
    school: School
    start: Tensor
    noise: Tensor
    needs = ()

    def init(self, x: Tensor, grad: Gradient, mix: Mix) -> tuple[Tensor, Tensor]:
        return self.start, torch.zeros_like(self.start)

    def step(self, x: Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        positions, v = state
        seen = observe(positions, self.school.predator(mix.step), self.noise[mix.step])
        w = mix(adapt(x, positions, *seen))
        return w, swim(self.mode, self.school, positions, v, w, positions, between(positions))


def simulate(mode: str, school: School, seed: int, alone: bool = False) -> Swim:
    """All fish as rows; ``alone`` leaves the averages out, so every fish has its own measurements only."""
    start, noise = noise_of(school, seed)
    d, u = observe(start, school.predator(0), noise[0])
    rounds: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def links(k: int, w: Tensor, state: Any) -> Tensor:
        near = neighbours(between(state[0]))
        rounds.append((w, *state, near))
        return torch.zeros_like(near) if alone else near

    swimming = Swimming(mode, school, start, noise)
    end = StackedFleet(school.size).run(
        swimming, start - d * u, torch.zeros_like, school.rounds, topology=links, every=0
    )
    estimates = [w for w, *_ in rounds[1:]] + [end.x]
    errors = [float((w - school.predator(k)).norm(dim=1).mean()) for k, w in enumerate(estimates)]
    moving = [k for k, (_, _, v, _) in enumerate(rounds) if k and v.norm(dim=1).mean() > SPEED / 10]
    changed = [not torch.equal(rounds[k][3], rounds[k - 1][3]) for k in moving]
    predator = torch.stack([school.predator(k) for k in range(school.rounds + 1)])
    last = errors[-max(1, school.rounds // 10) :]
    path = torch.stack([x for _, x, _, _ in rounds] + [end.state[0]])
    return Swim(path, predator, sum(last) / len(last), sum(changed) / len(changed))


def fish(mode: str, school: School, start: Tensor, noise: Tensor) -> Tensor:
    """The program of one agent, listing 2; its positions, [rounds + 1, 2]."""
    rank = bf.rank()
    x, v = start[rank : rank + 1].clone(), torch.zeros(1, 2, dtype=torch.float64)
    d, u = observe(x, school.predator(0), noise[0, rank : rank + 1])
    w = x - d * u
    path = [x]
    for k in range(school.rounds):
        positions = bf.allgather(x)  # fish see where the others are
        apart = between(positions)
        near = neighbours(apart)
        degree = near.sum(1).tolist()
        self_weight, src_weights = metropolis_hastings_weights(
            {other: degree[other] for other in near[rank].nonzero().flatten().tolist()}
        )
        w = adapt(w, x, *observe(x, school.predator(k), noise[k, rank : rank + 1]))
        w = bf.neighbor_allreduce(w, self_weight=self_weight, src_weights=src_weights)
        x, v = swim(mode, school, x, v, w, positions, apart[rank : rank + 1])
        path.append(x)
    return torch.cat(path)


def difference_of_real_fish(mode: str, school: School, seed: int) -> float:
    """The largest distance between real and simulated fish in any round."""
    start, noise = noise_of(school, seed)
    found = torch.stack(shoal.Fleet(school.size).run(fish, mode, school, start, noise), 1)
    return float((found - simulate(mode, school, seed).path).abs().max())


def distances(run: Swim) -> Tensor:
    """Of all fish from the predator at the end, [n]."""
    return (run.path[-1] - run.predator[-1]).norm(dim=1)


def largest_gap(run: Swim) -> float:
    """The largest angle, in degrees, in which the predator sees no fish at the end."""
    away = run.path[-1] - run.predator[-1]
    angle = torch.atan2(away[:, 1], away[:, 0]).sort().values
    gaps = torch.cat([angle[1:] - angle[:-1], angle[:1] + 2 * math.pi - angle[-1:]])
    return math.degrees(float(gaps.max()))


@dataclass(frozen=True)
class Results:
    """What is compared with the paper, for one number of fish; lists have a value for each seed.

    Attributes:
        school: The school.
        nearest: Distance of the nearest fish from the predator after the escape, over the safe distance.
        off_ring: Mean distance of fish from the circle after the encirclement, over its radius.
        gap: :func:`largest_gap` after it, in degrees.
        error, error_alone: Errors of the estimates during it, with and without averages.
        changed: Of both, as in :class:`Swim`.
        difference: Of real fish from simulated ones; None where there were none.
    """

    school: School
    nearest: list[float]
    off_ring: list[float]
    gap: list[float]
    error: list[float]
    error_alone: list[float]
    changed: list[float]
    difference: float | None = None


def claims(results: Sequence[Results]) -> list[Claim]:
    """The paper's statements against the results."""
    found = []
    for one in results:
        size, nearest, off, gap = one.school.size, one.nearest, one.off_ring, one.gap
        allowed = max(60.0, 2 * 360 / size)
        found += [
            Claim(
                f"{size} fish disperse from the predator (figure 5)",
                f"the nearest fish is at {Interval.of(nearest):.2f} of the safe distance, least 0.8",
                min(nearest) > 0.8,
            ),
            Claim(
                f"{size} fish encircle and trap the predator (figure 6)",
                f"off the circle by {Interval.of(off):.2f} of its radius, most 0.2; largest gap "
                f"{Interval.of(gap):.0f} degrees, most {allowed:.0f}",
                max(off) < 0.2 and max(gap) < allowed,
            ),
            exceeds(
                f"Partial averaging over the moving topology is effective: {size} fish know the predator's place "
                "better than alone (section IV-B)",
                one.error_alone,
                one.error,
            ),
        ]
        if one.difference is not None:
            found.append(
                Claim(
                    f"Listing 2, run by {size} real agents, is equations 4 and 5",
                    f"real and simulated fish differ by at most {one.difference:.1g}, limit 1e-6",
                    one.difference < 1e-6,
                )
            )
    many = max(results, key=lambda one: one.school.size)
    found.append(
        Claim(
            "The topology is highly dynamic, especially when fish are escaping or encircling (section IV-B)",
            f"for {many.school.size} fish it changes in {_percent(many.changed)} of rounds while they move, least 50%",
            min(many.changed) > 0.5,
        )
    )
    return found


def _percent(shares: Sequence[float]) -> str:
    return f"{Interval.of(100 * share for share in shares):.0f}%"


def measure(school: School, seeds: int, real: int, report: Report) -> tuple[Results, dict[str, Swim]]:
    """Results over seeds, and the runs of the first; real fish swim for ``real`` rounds."""
    runs = {mode: [simulate(mode, school, seed) for seed in range(seeds)] for mode in (ESCAPE, ENCIRCLE)}
    alone = [simulate(ENCIRCLE, school, seed, alone=True) for seed in range(seeds)]
    report.say(f"{school.size} simulated fish: {school.rounds} rounds, {seeds} seeds")
    difference = None
    if real:
        difference = max(difference_of_real_fish(mode, School(school.size, real), 0) for mode in (ESCAPE, ENCIRCLE))
        report.say(f"{school.size} real fish: at most {difference:.1g} from simulated ones")
    results = Results(
        school,
        [float(distances(run).min()) / school.safe for run in runs[ESCAPE]],
        [float((distances(run) - school.ring).abs().mean()) / school.ring for run in runs[ENCIRCLE]],
        [largest_gap(run) for run in runs[ENCIRCLE]],
        [run.error for run in runs[ENCIRCLE]],
        [run.error for run in alone],
        [run.changed for several in runs.values() for run in several],
        difference,
    )
    return results, {mode: several[0] for mode, several in runs.items()}


def _show(axes: Any, run: Swim, k: int, extent: float, mark: float) -> None:
    axes.scatter(*run.path[k].T, s=mark, color="#1f77b4", linewidths=0)
    axes.scatter(*run.predator[k], s=60, color="#d62728", marker="X", linewidths=0)
    axes.set(xlim=(-extent, extent), ylim=(-extent, extent), aspect="equal", xticks=[], yticks=[])


def draw(figure: Figure, runs: dict[str, Swim], school: School) -> None:
    """Four moments of the escape and of the encirclement."""
    grid = figure.subplots(2, 4)
    for row, (mode, run) in zip(grid, runs.items(), strict=True):
        for axes, share in zip(row, (0.0, 0.2, 0.45, 1.0), strict=True):
            k = round(share * school.rounds)
            _show(
                axes, run, k, 1.2 * school.safe if mode == ESCAPE else 2.2 * school.ring, 4 if school.size > 100 else 20
            )
            axes.set_title(f"{mode}, round {k}", fontsize=9)


def animate(path: Path, runs: dict[str, Swim], school: School, frames: int) -> None:
    """Write a GIF: the escape beside the encirclement, in eight colours."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    images = []
    for frame in range(frames):
        figure = Figure(figsize=(5, 2.6), dpi=80, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        for axes, (mode, run) in zip(figure.subplots(1, 2), runs.items(), strict=True):
            k = round(frame / (frames - 1) * school.rounds)
            _show(axes, run, k, 1.2 * school.safe if mode == ESCAPE else 2.2 * school.ring, 3)
            axes.set_title(mode, fontsize=9)
        canvas.draw()
        images.append(
            Image.frombytes("RGBA", canvas.get_width_height(), canvas.buffer_rgba()).convert("RGB").quantize(8)
        )
    images[0].save(path, save_all=True, append_images=images[1:], duration=100, loop=0, optimize=True)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(__doc__, seeds=3).parse_args(argv)
    torch.set_num_threads(1)  # agents are threads, or small tensors
    report = Report(__file__, "BlueFog: the fish school (figures 5 and 6)", args)
    few, many = (
        School(REAL_FISH, 60 if args.quick else 120),
        School(60 if args.quick else MANY_FISH, 100 if args.quick else 160),
    )
    of_few, _ = measure(few, args.seeds, 10 if args.quick else few.rounds, report)
    of_many, runs = measure(many, args.seeds, 0, report)
    report.table(
        "At the end. Errors are of the estimates while fish encircle the predator; changes are of neighbours",
        [
            "fish",
            "nearest, of the safe distance",
            "off the circle, of its radius",
            "largest gap",
            "error",
            "error alone",
            "rounds with changes",
        ],
        [
            [
                one.school.size,
                f"{Interval.of(one.nearest):.2f}",
                f"{Interval.of(one.off_ring):.3f}",
                f"{Interval.of(one.gap):.0f} degrees",
                f"{Interval.of(one.error):.3f}",
                f"{Interval.of(one.error_alone):.3f}",
                _percent(one.changed),
            ]
            for one in (of_few, of_many)
        ],
    )
    report.claim(claims([of_few, of_many]))
    report.figure(lambda figure: draw(figure, runs, many), (9.6, 5))
    report.image(lambda path: animate(path, runs, many, 5 if args.quick else 40), ".gif")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
